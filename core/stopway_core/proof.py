"""Whether a replica's books balance, and a look into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stopway_core.ledger import GRAMMARS, REQUEST, LedgerError

if TYPE_CHECKING:
    from stopway_core.replica import Replica


def check(replica: Replica) -> None:
    """Raise ``LedgerError`` unless ledger, requests and steps agree. O(everything)."""
    replica.ledger.check()
    pool = replica.ledger.blocks
    holders = pool.holders()
    for rid, seq in replica.seqs.items():
        if pool.holds(seq.holder) != seq.blocks:
            raise LedgerError(f"request {rid}: its block table is not what it holds")
        if holders.pop(seq.holder, 0) != len(seq.blocks):
            raise LedgerError(f"request {rid}: holds are not as counted")
        if len(seq.blocks) * replica.block_size < seq.launched:
            raise LedgerError(f"request {rid} runs beyond its blocks")
        for index, block in enumerate(seq.blocks):
            if bool(pool.sealed[block]) != (index < seq.sealed):
                raise LedgerError(f"request {rid}: block {block} sealed out of order")
            if index >= seq.sealed and pool.refs[block] != 1:
                raise LedgerError(f"request {rid}: mutable block {block} is shared")
        if seq.sealed * replica.block_size > seq.confirmed or seq.confirmed > seq.launched:
            raise LedgerError(f"request {rid}: sealed, confirmed and launched out of order")
    for holder in holders:
        if holder[0] == REQUEST:
            raise LedgerError(f"{holder} holds blocks and is not running")


def snapshot(replica: Replica) -> Mapping[str, object]:
    """Counts and holders, for people: ``/debug/ledger``."""
    pool, grammars = replica.ledger.blocks, replica.ledger.pools[GRAMMARS]
    return {
        "turn": replica.turn,
        "step": replica.step,
        "in_flight": list(replica.in_flight),
        "digest": f"{replica.digest:016x}",
        "blocks": {
            "total": pool.total,
            "free": pool.free,
            "held": pool.held,
            "cached": pool.idle,
            "block_size": replica.block_size,
        },
        "grammars": {
            "total": grammars.total,
            "free": grammars.free,
            "held": grammars.held,
            "cached": grammars.idle,
        },
        "holders": {f"{kind}:{ident}": n for (kind, ident), n in pool.holders().items()},
    }
