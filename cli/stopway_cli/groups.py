"""``stopway groups | pause | resume | drain``: what the groups do with their requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stopway_cli import render
from stopway_cli.client import Api, Server
from stopway_cli.errors import Exit

_BLOCKS = ("free", "held", "cached")


async def show(server: Server, as_json: bool) -> Exit:
    """Print all groups; ``FAILED`` when some of them do not say how they are."""
    async with Api(server) as api:
        return _told(await api.get("/v1/groups"), as_json)


async def change(
    server: Server, what: str, body: Mapping[str, Any], groups: Sequence[str], as_json: bool
) -> Exit:
    """``pause``, ``resume`` or ``drain`` the ``groups`` (empty: all), print how they are then.

    ``FAILED`` when the gateway still waits for some of them.
    """
    named = {"groups": list(groups)} if groups else {}
    async with Api(server) as api:
        return _told(await api.post(f"/v1/groups/{what}", {**body, **named}), as_json)


def _told(answer: Mapping[str, Any], as_json: bool) -> Exit:
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        render.console().print(screen(answer))
    return Exit.FAILED if answer.get("pending_on") else Exit.OK


def screen(answer: Mapping[str, Any]) -> RenderableType:
    """The gateway's answer: a row for each group, and whom it still waits for."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold dim")
    for title in ("group", "mode", "epoch", "running", "waiting", *_BLOCKS):
        table.add_column(title, justify="left" if title in ("group", "mode") else "right")
    for group in answer.get("groups") or []:
        blocks = group.get("blocks") or {}
        facts = [group.get(key) for key in ("group", "mode", "epoch", "running", "waiting")]
        facts += [blocks.get(key) for key in _BLOCKS]
        table.add_row(*("-" if fact is None else str(fact) for fact in facts))
    pending = answer.get("pending_on") or []
    if not pending:
        return table
    return Group(table, Text("waits for: " + ", ".join(map(str, pending)), style="yellow"))
