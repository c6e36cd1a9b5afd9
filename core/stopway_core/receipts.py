"""Receipts: for each stop, when every rank noticed it, stopped, and had its blocks back.

Ranks report little (the turn that they applied, the step that they executed, the stops that they
noticed, with times); everything here is derived from that by the leader. A stop is *reclaimed* on
a rank when the rank has applied its turn and executed the newest step that its requests were in:
from then on even use that is not ordered behind that step may take the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from stopway_core.ledger import Dropped
from stopway_core.names import trace_id_of
from stopway_core.replica import StopApplied
from stopway_core.types import Outcome, Reason, Stop, StopStatus

REQUEST_IDS_MAX = 100


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank is."""

    rank: int
    stage: int
    node: str


@dataclass(slots=True)
class RankPart:
    """One rank's part of one receipt; times in Unix seconds by that rank's clock."""

    turn_noticed: int | None = None
    noticed_at: float | None = None
    stopped_at: float | None = None
    reclaimed_at: float | None = None


@dataclass(slots=True)
class Receipt:
    """One stop on one group."""

    stop_id: str
    reason: Reason
    tenant: str  # who asked
    trace_id: str
    parts: list[RankPart]
    status: StopStatus = StopStatus.NOTICED
    uids: list[str] = field(default_factory=list)
    count: int = 0
    already: int = 0  # of them, those that had ended before
    outcomes: dict[str, int] = field(default_factory=dict)
    # The newest: a stop that came before its request, or that its policy defers, has several.
    turn_effective: int | None = None
    drain_step: int = 0
    marked: int = 0  # of the requests, those on which it has yet to take effect
    tokens_discarded: int = 0
    dropped: Dropped = field(default_factory=Dropped)
    epoch_ended: bool = False
    _unknown: dict[str, None] = field(default_factory=dict)  # named, and not seen so far

    def unmatched(self, uid: str) -> None:
        """Count a request that the stop named and that nobody here knows."""
        self.matched(uid, "unknown")
        self._unknown[uid] = None

    def arrived(self, uid: str) -> None:
        """A request that was unknown has come at last: it no longer counts as that."""
        if uid in self._unknown:
            del self._unknown[uid]
            self.count -= 1
            self.outcomes["unknown"] -= 1
            if uid in self.uids:
                self.uids.remove(uid)

    def matched(self, uid: str, outcome: str) -> None:
        """Count one request that the stop named and what became of it."""
        self.count += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if len(self.uids) < REQUEST_IDS_MAX:
            self.uids.append(uid)


class ReceiptBook:
    """All receipts of one epoch. ``changed`` collects those to be published."""

    def __init__(
        self, group: str, epoch: int, ranks: list[RankInfo], *, keep_max: int = 20_000
    ) -> None:
        self.group = group
        self.epoch = epoch
        self.ranks = ranks
        self._keep_max = keep_max
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()
        self._open: dict[str, Receipt] = {}  # effective, not yet reclaimed
        self._applied = [0] * len(ranks)
        self._executed = [0] * len(ranks)
        self._changed: dict[str, Receipt] = {}
        # Notices that came before the leader itself knew of the stop.
        self._early: OrderedDict[str, list[tuple[int, int, float]]] = OrderedDict()

    def get(self, stop_id: str) -> Receipt | None:
        return self._receipts.get(stop_id)

    def open(self, stop: Stop) -> Receipt:
        """The receipt of ``stop``, made when it is new."""
        receipt = self._receipts.get(stop.stop_id)
        if receipt is None:
            parts = [RankPart() for _ in self.ranks]
            receipt = self._receipts[stop.stop_id] = Receipt(
                stop.stop_id, stop.reason, stop.tenant, trace_id_of(stop.traceparent), parts
            )
            while len(self._receipts) > self._keep_max:
                oldest, _ = self._receipts.popitem(last=False)
                self._open.pop(oldest, None)
            for rank, turn, at in self._early.pop(stop.stop_id, ()):
                self.noticed(rank, stop.stop_id, turn, at)
        return receipt

    def noticed(self, rank: int, stop_id: str, turn: int, at: float) -> None:
        """A rank heard of a stop, by notice or by turn; the first time counts."""
        receipt = self._receipts.get(stop_id)
        if receipt is None:
            early = self._early.setdefault(stop_id, [])
            if len(early) < len(self.ranks):
                early.append((rank, turn, at))
            if len(self._early) > self._keep_max:
                self._early.popitem(last=False)
            return
        part = receipt.parts[rank]
        if part.noticed_at is None or at < part.noticed_at:
            part.turn_noticed, part.noticed_at = turn, at

    def effective(self, turn: int, applied: StopApplied) -> None:
        """The leader has put the stop in ``turn``. Ranks will report that they applied it."""
        receipt = self._receipts.get(applied.stop_id)
        if receipt is None:  # more stops in one turn than are kept
            return
        receipt.turn_effective = turn
        for part in receipt.parts:  # a late match: the stop takes effect once more
            part.stopped_at = part.reclaimed_at = None
        receipt.drain_step = max(receipt.drain_step, applied.drain_step)
        receipt.dropped = receipt.dropped.plus(applied.dropped)
        if receipt.count and receipt.already == receipt.count:
            receipt.status = StopStatus.ALREADY_FINISHED
        else:
            receipt.status = StopStatus.NOTICED
            self._open[applied.stop_id] = receipt
        self._changed[applied.stop_id] = receipt

    def progress(
        self, rank: int, applied: int, applied_at: float, executed: int, executed_at: float
    ) -> None:
        """A rank has applied every turn up to ``applied`` and run every step up to ``executed``."""
        self._applied[rank] = max(self._applied[rank], applied)
        self._executed[rank] = max(self._executed[rank], executed)
        for stop_id, receipt in list(self._open.items()):
            self._advance(stop_id, receipt, rank, applied_at, executed_at)

    def _advance(
        self, stop_id: str, receipt: Receipt, rank: int, applied_at: float, executed_at: float
    ) -> None:
        part = receipt.parts[rank]
        turn = receipt.turn_effective
        assert turn is not None  # it is open since it took effect
        if self._applied[rank] < turn:
            return
        if part.stopped_at is None:
            part.stopped_at = applied_at
            if part.noticed_at is None or applied_at < part.noticed_at:
                part.noticed_at, part.turn_noticed = applied_at, turn  # the turn was the notice
        if part.reclaimed_at is None and self._executed[rank] >= receipt.drain_step:
            late = receipt.drain_step and executed_at > part.stopped_at
            part.reclaimed_at = executed_at if late else part.stopped_at
        status = receipt.status
        if receipt.marked:
            return
        if all(p.reclaimed_at is not None for p in receipt.parts):
            status = StopStatus.RECLAIMED
            del self._open[stop_id]
        elif all(p.stopped_at is not None for p in receipt.parts):
            status = StopStatus.STOPPED
        if status is not receipt.status:
            receipt.status = status
            self._changed[stop_id] = receipt

    def changed(self) -> list[dict[str, Any]]:
        """The receipts whose status changed since the last call, in their wire form."""
        out = [self.to_json(receipt) for receipt in self._changed.values()]
        self._changed.clear()
        return out

    def settled(self, step: int) -> bool:
        """Whether every rank has executed ``step``, and nothing that was stopped is pending."""
        return not self._open and min(self._executed) >= step

    def touch(self, stop_id: str) -> None:
        """Publish a receipt again (its gateway asked, so the last answer may be lost)."""
        receipt = self._receipts.get(stop_id)
        if receipt is not None and receipt.turn_effective is not None:
            self._changed[stop_id] = receipt

    def pending_on(self, receipt: Receipt) -> list[str]:
        """What the stop still waits for, by name; empty when it is reclaimed."""
        if receipt.stop_id not in self._open:
            return []
        pending = []
        if receipt.marked:
            pending.append(f"{receipt.marked} requests that the policy has yet to end")
        for info, part in zip(self.ranks, receipt.parts, strict=True):
            if part.stopped_at is None:
                pending.append(f"rank {info.rank}: turn {receipt.turn_effective}")
            elif part.reclaimed_at is None:
                pending.append(f"rank {info.rank}: step {receipt.drain_step} in flight")
        return pending

    def to_json(self, receipt: Receipt) -> dict[str, Any]:
        """The wire form; see docs/internal-api.md."""
        outcomes = {outcome.value: 0 for outcome in Outcome} | {"unknown": 0}
        outcomes.update(receipt.outcomes)
        return {
            "stop_id": receipt.stop_id,
            "group": self.group,
            "epoch": self.epoch,
            "status": receipt.status.value,
            "reason": receipt.reason.value,
            "tenant": receipt.tenant,
            "trace_id": receipt.trace_id,
            "outcome": outcomes,
            "request_ids": receipt.uids,
            "count": receipt.count,
            "turn_effective": receipt.turn_effective,
            "tokens_discarded": receipt.tokens_discarded,
            "blocks_reclaimed": receipt.dropped.freed,
            "blocks_cached": receipt.dropped.cached,
            "blocks_lent": receipt.dropped.lent,
            "epoch_ended": receipt.epoch_ended,
            "pending_on": self.pending_on(receipt),
            "ranks": [
                {
                    "rank": info.rank,
                    "stage": info.stage,
                    "node": info.node,
                    "turn_noticed": part.turn_noticed,
                    "noticed_at": part.noticed_at,
                    "stopped_at": part.stopped_at,
                    "reclaimed_at": part.reclaimed_at,
                }
                for info, part in zip(self.ranks, receipt.parts, strict=True)
            ],
        }
