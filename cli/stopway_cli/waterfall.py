"""Spans as a tree with bars: the waterfall of a request or of a stop.

Clocks of different nodes may disagree by more than a phase lasts, so the phases of a stop are in
their own order, rank by rank, and only other spans are ordered by time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

BAR_WIDTH = 36
_PHASES = {
    "stop.notify": 0,
    "stop.notice": 1,
    "stop.in_flight": 2,
    "stop.reclaim": 3,
    "stop.handoff": 4,
}
_COLOURS = {
    "stop": "bold red",
    "stop.notify": "magenta",
    "stop.notice": "magenta",
    "stop.in_flight": "yellow",
    "stop.reclaim": "green",
    "stop.handoff": "cyan",
}
# What is worth a glance, by span; a span of another name shows the first of these.
_FACTS: dict[str, dict[str, str]] = {
    "": {"stopway.outcome": "", "stopway.reason": ""},
    "stop": {"stopway.stop.reason": "", "stopway.turn.effective": "effective at turn "},
    "stop.notify": {},
    "stop.notice": {"stopway.turn.noticed": "at turn "},
    "stop.in_flight": {
        "stopway.turn.effective": "turn ",
        "stopway.step.drained": "drained step ",
        "stopway.tokens.discarded": "discarded ",
    },
    "stop.reclaim": {"stopway.blocks.reclaimed": "blocks "},
    "stop.handoff": {"stopway.blocks.cached": "cached ", "stopway.blocks.lent": "lent "},
}


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are Unix seconds; ``parent`` is empty for a root."""

    span_id: str
    parent: str
    name: str
    start: float
    end: float
    attributes: Mapping[str, Any]

    @property
    def duration_ms(self) -> float:
        return max(0.0, self.end - self.start) * 1000.0


def from_jaeger(document: Mapping[str, Any]) -> list[Span]:
    """Spans of the answer of Jaeger's ``GET /api/traces/{id}``."""
    spans = []
    for trace in document.get("data") or []:
        for item in trace.get("spans", []):
            start = item["startTime"] / 1e6
            references = item.get("references") or []
            parent = next((r["spanID"] for r in references if r["refType"] == "CHILD_OF"), "")
            attributes = {tag["key"]: tag["value"] for tag in item.get("tags", [])}
            end = start + item["duration"] / 1e6
            name = item["operationName"]
            spans.append(Span(item["spanID"], parent, name, start, end, attributes))
    return spans


def subtree(spans: Iterable[Span], stop_id: str) -> list[Span]:
    """Only the spans of one stop: its ``stop`` spans and all below them."""
    everything = list(spans)
    wanted = {
        span.span_id
        for span in everything
        if span.name == "stop" and span.attributes.get("stopway.stop.id") == stop_id
    }
    grew = True
    while grew:
        below = {span.span_id for span in everything if span.parent in wanted}
        grew = not below <= wanted
        wanted |= below
    return [span for span in everything if span.span_id in wanted]


def ordered(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """(depth, span), parents before children, siblings in the order things happened."""
    unique = {span.span_id: span for span in spans}
    children: dict[str, list[Span]] = {}
    for span in unique.values():
        parent = span.parent if span.parent in unique else ""
        children.setdefault(parent, []).append(span)
    result: list[tuple[int, Span]] = []
    pending = [(0, span) for span in sorted(children.get("", []), key=_order, reverse=True)]
    while pending:
        depth, span = pending.pop()
        result.append((depth, span))
        below = sorted(children.pop(span.span_id, []), key=_order, reverse=True)
        pending.extend((depth + 1, child) for child in below)
    return result


def _order(span: Span) -> tuple[float, ...]:
    if span.name in _PHASES:  # phases by name, then ranks: their clocks may differ
        return _PHASES[span.name], float(span.attributes.get("stopway.rank", -1))
    return -1, span.start, span.end


def bar(
    start: float, end: float, low: float, high: float, width: int = BAR_WIDTH
) -> tuple[int, int]:
    """(blank columns, filled columns) of a bar for ``start .. end`` in ``low .. high``."""
    scale = width / (high - low) if high > low else 0.0
    first = min(width - 1, int((start - low) * scale))
    last = min(width, max(first + 1, round((end - low) * scale)))
    return first, last - first


def render(spans: Iterable[Span], *, width: int = BAR_WIDTH, ascii_only: bool = False) -> Table:
    """The waterfall, with bars of ``width``; ``ascii_only`` where blocks cannot be drawn."""
    rows = ordered(spans)
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True)
    table.add_column("span", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("", width=width, no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    if not rows:
        return table
    low = min(span.start for _, span in rows)
    high = max(span.end for _, span in rows)
    block = "#" if ascii_only else "█"
    for depth, span in rows:
        blank, filled = bar(span.start, span.end, low, high, width)
        colour = _COLOURS.get(span.name, "blue")
        table.add_row(
            Text("  " * depth + label(span), style=colour),
            f"{(span.start - low) * 1000:.1f}",
            f"{span.duration_ms:.1f} ms",
            Text(" " * blank + block * filled, style=colour),
            facts(span),
        )
    return table


def label(span: Span) -> str:
    """A span's name, with its rank where it has one."""
    rank = span.attributes.get("stopway.rank")
    return span.name if rank is None else f"{span.name} [rank {rank}]"


def facts(span: Span) -> str:
    """The attributes worth a glance."""
    chosen = _FACTS.get(span.name, _FACTS[""])
    parts = [
        f"{prefix}{span.attributes[key]}"
        for key, prefix in chosen.items()
        if span.attributes.get(key) not in (None, "")
    ]
    return ", ".join(parts)
