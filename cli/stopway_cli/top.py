"""``stopway top``: requests, groups and blocks by holder, live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stopway_cli import ledger, metrics, render
from stopway_cli.client import Api, Server
from stopway_cli.errors import CliError

_ROWS_MAX = 20
_ENDED = frozenset({"finished", "stopped", "failed"})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the server said at one moment. ``ledgers`` is empty for keys that are no admin's."""

    url: str
    at: float
    loads: Mapping[str, metrics.GroupLoad]
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    ledgers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


async def snapshot(api: Api) -> Snapshot:
    """Ask the server. Raises ``CliError`` when it does not answer."""
    loads = metrics.groups(metrics.parse(await api.text("/metrics")))
    listed = await api.get("/v1/requests")
    try:
        ledgers = ledger.by_group(await api.get("/debug/ledger"))
    except CliError:  # for admins only
        ledgers = {}
    return Snapshot(api.server.url, time.time(), loads, _rows(listed), ledgers)


def _rows(listed: Any) -> list[Mapping[str, Any]]:
    return [row for row in listed.get("data") or [] if isinstance(row, Mapping)]


def screen(now: Snapshot) -> RenderableType:
    """One picture of a snapshot."""
    head = Text.assemble(
        ("stopway top ", "bold"), f"{now.url}  ", (time.strftime("%H:%M:%S"), "dim")
    )
    parts: list[RenderableType] = [head, _groups(now)]
    if now.ledgers:
        parts.append(_holders(now))
    parts.append(_requests(now))
    return Group(*parts)


def _groups(now: Snapshot) -> Table:
    table = _table("group", "ranks", "epoch", "running", "waiting", "free", "held", "cached")
    for name, load in now.loads.items():
        found = now.ledgers.get(name, {})
        blocks = load.blocks
        values = (load.running, load.waiting, blocks.free, blocks.held, blocks.cached)
        known = (found.get("ranks", "-"), found.get("epoch", "-"))
        ranks = len(known[0]) if isinstance(known[0], (list, dict)) else known[0]
        table.add_row(name, str(ranks), str(known[1]), *map(str, values))
    return table


def _holders(now: Snapshot) -> Table:
    table = _table("group", "holder", "how many", "block edges")
    for name, found in now.ledgers.items():
        for kind, (count, edges) in sorted(ledger.holders_by_kind(found).items()):
            table.add_row(name, kind, str(count), str(edges))
    return table


def _requests(now: Snapshot) -> RenderableType:
    live = [row for row in now.requests if str(row.get("outcome") or "") not in _ENDED]
    if not live:
        return Text("no request is running or waiting", style="dim")
    table = _table("request", "tenant", "group", "state", "age", "tokens")
    for row in live[:_ROWS_MAX]:
        begun = row.get("created") or now.at
        table.add_row(
            str(row.get("id") or "?"),
            str(row.get("tenant") or "-"),
            str(row.get("group") or "-"),
            str(row.get("status") or "-"),
            f"{now.at - float(begun):.1f} s",
            str(row.get("completion_tokens", "-")),
        )
    if len(live) > _ROWS_MAX:
        table.caption = f"and {len(live) - _ROWS_MAX} more"
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold dim")
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index == 0 else "right", no_wrap=True)
    return table


async def run(server: Server, once: bool, interval_s: float) -> None:
    """Show it once, or again and again until interrupted."""
    out = render.console()
    async with Api(server, timeout_s=5.0) as api:
        first = await snapshot(api)
        if once:
            out.print(screen(first))
            return
        with Live(screen(first), console=out, auto_refresh=False, screen=out.is_terminal) as live:
            while True:
                await asyncio.sleep(interval_s)
                live.update(screen(await snapshot(api)), refresh=True)
