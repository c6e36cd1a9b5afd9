"""The figures that are shown: where each stands in a report, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shown:
    """One row: ``scale`` turns the report's unit into the title's; ``best`` is low, high or ''."""

    title: str
    path: tuple[str, ...]
    scale: float = 1.0
    digits: int = 0
    best: str = "low"

    def value(self, report: Mapping[str, Any]) -> float | None:
        """The number in the title's unit, ``None`` where there was nothing to measure."""
        found: Any = report
        for key in self.path:
            found = found.get(key) if key in found else 0
        return None if found is None else float(found) * self.scale

    def text(self, report: Mapping[str, Any]) -> str:
        """The number as it is printed."""
        value = self.value(report)
        return "-" if value is None else f"{value:,.{self.digits}f}"


def _spread(title: str, *path: str) -> list[Shown]:
    return [Shown(f"{title} {p} ms", (*path, p), 1000, 1) for p in ("p50", "p90", "p99")]


SHOWN = [
    *_spread("stop known to leader", "cancel_s", "notify"),
    *_spread("stop effective", "cancel_s", "effective"),
    *_spread("blocks reusable", "cancel_s", "reclaimed"),
    Shown("stops that came too late", ("stops", "too_late")),
    Shown("stops of what had finished", ("stops", "already_finished")),
    Shown("tokens thrown away", ("tokens", "thrown_away")),
    Shown("prefill thrown away", ("tokens", "prefill_thrown_away")),
    Shown("block-seconds after a stop", ("block_seconds_after_stop",), digits=1),
    Shown("hazards", ("hazards",)),
    Shown("preemptions", ("preemptions",)),
    Shown("recomputed tokens", ("tokens", "recomputed")),
    Shown("cache hits, tokens", ("tokens", "cache_hits"), best="high"),
    Shown("of them after a stop", ("tokens", "cache_hits_after_stop"), best="high"),
    Shown("first token p50 ms", ("latency_s", "first_token", "p50"), 1000, 1),
    Shown("first token p99 ms", ("latency_s", "first_token", "p99"), 1000, 1),
    Shown("goodput tokens/s", ("tokens", "goodput_per_s"), best="high"),
    Shown("throughput tokens/s", ("tokens", "throughput_per_s"), best="high"),
    Shown("finished", ("outcomes", "finished"), best=""),
    Shown("stopped", ("outcomes", "stopped"), best=""),
    Shown("failed", ("outcomes", "failed"), best=""),
    Shown("refused", ("outcomes", "refused"), best=""),
]


def shown_in(reports: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """All that is shown of these reports: some figures only some workloads have."""
    levels = {int(level) for report in reports for level in report.get("priorities", ())}
    shared = Shown("tokens taken from a choice", ("choices", "shared_tokens"), best="")
    return [
        *SHOWN,
        *([shared] if any("choices" in report for report in reports) else []),
        *(shown for level in sorted(levels) for shown in _of_priority(level)),
    ]


def _of_priority(level: int) -> list[Shown]:
    path = ("priorities", str(level))
    first = [
        Shown(f"priority {level}: first token {p} ms", (*path, "first_token_s", p), 1000, 1)
        for p in ("p50", "p99")
    ]
    return [*first, Shown(f"priority {level}: preemptions", (*path, "preemptions"))]


def best_of(shown: Shown, reports: list[dict[str, Any]]) -> set[int]:
    """Which reports are best in a figure, as it is printed; none when all are alike."""
    values = {i: value for i, r in enumerate(reports) if (value := shown.value(r)) is not None}
    texts = {index: shown.text(reports[index]) for index in values}
    if not shown.best or len(set(texts.values())) < 2:
        return set()
    best = (min if shown.best == "low" else max)(values, key=values.__getitem__)
    return {index for index, text in texts.items() if text == texts[best]}
