"""Reading ``/debug/ledger``: what holds the blocks of each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stopway_cli.errors import CliError, Exit


def by_group(answer: Any) -> dict[str, Mapping[str, Any]]:
    """Group -> ledger, from ``/debug/ledger``: an object per group, or a list of them."""
    groups = answer.get("groups", answer) if isinstance(answer, Mapping) else answer
    if isinstance(groups, Mapping):
        return {name: value for name, value in groups.items() if isinstance(value, Mapping)}
    return {str(g.get("group", index)): g for index, g in enumerate(groups or [])}


def holders_by_kind(ledger: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Kind of holder -> (holders, edges) of one ledger's snapshot."""
    kinds: dict[str, tuple[int, int]] = {}
    for name, count in (ledger.get("holders") or {}).items():
        kind = str(name).partition(":")[0]
        holders, edges = kinds.get(kind, (0, 0))
        kinds[kind] = (holders + 1, edges + int(count))
    return kinds


def total_blocks(ledger: Mapping[str, Any]) -> int:
    """All KV blocks of one group's ledger. Raises ``CliError`` when it does not say."""
    blocks = ledger.get("blocks") or {}
    if "total" not in blocks:
        raise CliError("/debug/ledger names no total of blocks", Exit.SERVER)
    return int(blocks["total"])
