"""Receipts as tables, and the one console everything is printed with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_GOOD = frozenset({"reclaimed", "already_finished"})


def console(*, stderr: bool = False) -> Console:
    """A console that keeps lines whole when its output is not a terminal."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, width=160, soft_wrap=False)
    return made


def draws_blocks(target: Console) -> bool:
    """Whether the output's encoding has block characters."""
    return (target.encoding or "").lower().replace("-", "").startswith("utf")


def accepted_at(stop: Mapping[str, Any], otherwise: float | None = None) -> float | None:
    """The Unix time from which a stop's times count.

    When a gateway accepted it, as it says; else ``otherwise``; else the first notice.
    """
    if isinstance(stop.get("accepted_at"), (int, float)):
        return float(stop["accepted_at"])
    times = [
        rank["noticed_at"]
        for group in stop.get("groups") or []
        for rank in group.get("ranks") or []
        if rank.get("noticed_at")
    ]
    return min(times, default=None) if otherwise is None else otherwise


def receipt(stop: Mapping[str, Any], since: float | None = None) -> RenderableType:
    """A stop's answer: what it did, and a row for every rank.

    Times are milliseconds after ``since`` (Unix seconds; default: when it was accepted).
    """
    start = accepted_at(stop) if since is None else since
    parts: list[RenderableType] = [_head(stop)]
    for group in stop.get("groups") or []:
        parts.append(_group_line(group))
        parts.append(_ranks(group, start))
    pending = stop.get("pending_on") or []
    if pending:
        parts.append(Text("still held by: " + ", ".join(map(str, pending)), style="yellow"))
    return Group(*parts)


def _head(stop: Mapping[str, Any]) -> Text:
    status = str(stop.get("status", "?"))
    line = Text.assemble(
        ("receipt ", "bold"),
        f"{stop.get('stop_id', '?')}  ",
        (status, "bold green" if status in _GOOD else "bold yellow"),
    )
    details = {
        "reason": stop.get("reason"),
        "outcome": _outcome(stop.get("outcome")),
        "requests": stop.get("count", len(stop.get("request_ids") or [])),
    }
    for name, value in details.items():
        if value not in (None, ""):
            line.append(f"  {name} {value}", style="dim")
    return line


def _outcome(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name}" for name, count in value.items() if count) or "none"
    return str(value or "")


def _group_line(group: Mapping[str, Any]) -> Text:
    turn = group.get("turn_effective")
    facts = [
        f"epoch {group.get('epoch')}",
        "no turn" if turn is None else f"effective at turn {turn}",
        f"{group.get('tokens_discarded', 0)} tokens discarded",
        f"{group.get('blocks_reclaimed', 0)} blocks reclaimed",
        f"{group.get('blocks_cached', 0)} cached",
        f"{group.get('blocks_lent', 0)} lent",
    ]
    if group.get("epoch_ended"):
        facts.append("the epoch ended")
    return Text.assemble((f"  {group.get('group', '?')}: ", "bold"), ", ".join(facts))


def _ranks(group: Mapping[str, Any], start: float | None) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=True)
    for title in ("rank", "stage", "node", "noticed at turn", "noticed", "stopped", "reclaimed"):
        table.add_column(title, justify="left" if title == "node" else "right", no_wrap=True)
    for rank in group.get("ranks") or []:
        table.add_row(
            str(rank.get("rank", "?")),
            str(rank.get("stage", "?")),
            str(rank.get("node") or "-"),
            _or_dash(rank.get("turn_noticed")),
            *(_after(rank.get(key), start) for key in ("noticed_at", "stopped_at", "reclaimed_at")),
        )
    return table


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _after(moment: float | None, start: float | None) -> str:
    if not moment or start is None:
        return "-"
    return f"+{(moment - start) * 1000:.1f} ms"
