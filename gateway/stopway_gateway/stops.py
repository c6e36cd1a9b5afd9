"""A stop as its gateway keeps it: the parts of the groups it went to, and their sum."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stopway_core.types import Outcome, Stop, StopStatus
from stopway_gateway.request import Request, Trace

REQUEST_IDS_MAX = 100
_ORDER = (StopStatus.ACCEPTED, StopStatus.NOTICED, StopStatus.STOPPED, StopStatus.RECLAIMED)
RESOLVED = (StopStatus.RECLAIMED, StopStatus.ALREADY_FINISHED)
_BEFORE_ITS_TURN = (StopStatus.ACCEPTED, StopStatus.NOTICED)
END_OWED = "the end of an answer"
_COUNTS = ("tokens_discarded", "blocks_reclaimed", "blocks_cached", "blocks_lent")
_RANK_KEYS = (
    "rank",
    "stage",
    "node",
    "turn_noticed",
    "noticed_at",
    "stopped_at",
    "reclaimed_at",
)


@dataclass(slots=True)
class Part:
    """What one group was told, and what it says. ``receipt`` is its newest."""

    stop_id: str
    group: str
    signed: dict[str, Any] = field(default_factory=dict)
    status: StopStatus = StopStatus.ACCEPTED
    receipt: dict[str, Any] = field(default_factory=dict)
    attempts: int = 0
    due: float = 0.0  # monotonic; when it is sent again
    asked_again: bool = False  # its leader is new here and is to say what it knows
    named_only: bool = False  # told because a gateway named it: it has requests of that one

    @property
    def resolved(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status in RESOLVED

    @property
    def settled(self) -> bool:
        """Whether its turn is known, so that it need not be sent again."""
        known = self.resolved or self.receipt.get("turn_effective") is not None
        return known and not self.asked_again

    @property
    def unknown(self) -> bool:
        """Whether the group has heard of none of the requests."""
        outcome = self.outcome
        return (
            self.resolved
            and outcome.get("unknown", 0) > 0
            and sum(outcome.values()) == outcome["unknown"]
        )

    @property
    def groups(self) -> list[str]:
        """The groups that answer for the requests of a gateway, if it is a gateway's part."""
        return [str(group) for group in self.receipt.get("groups") or ()]

    @property
    def defers(self) -> bool:
        """Whether it is a gateway's that has ended nothing itself: its groups say what became."""
        return "groups" in self.receipt and not sum(self.outcome.values())

    @property
    def outcome(self) -> dict[str, int]:
        """Requests by outcome, as the receipt counts them."""
        return {k: int(v) for k, v in (self.receipt.get("outcome") or {}).items()}

    def merge(self, receipt: dict[str, Any]) -> bool:
        """Take a receipt, unless an older one already said more. Raises ``ValueError``."""
        status = StopStatus(receipt["status"])
        self.asked_again = False
        if self._of_a_leader_that_never_knew(receipt):
            # The leader that had put it in a turn is gone, and its processes with it.
            if status is not StopStatus.RECLAIMED:
                return False
            self.status = status
            self.receipt = {**self.receipt, "pending_on": [], "epoch_ended": True}
            return True
        if self.unknown:
            # The stop overtook its request: when that comes, the stop takes effect again.
            self.status, self.receipt = status, receipt
            return True
        if self.resolved:
            return False
        if status is StopStatus.ALREADY_FINISHED and self.status is StopStatus.STOPPED:
            # A later epoch knows nothing of it any more: then nothing holds anything either.
            self.status = StopStatus.RECLAIMED
            self.receipt = {**self.receipt, "pending_on": []}
            return True
        if status in _ORDER and _ORDER.index(status) < _ORDER.index(self.status):
            return False
        self.status = status
        self.receipt = receipt
        return True

    def _of_a_leader_that_never_knew(self, receipt: dict[str, Any]) -> bool:
        """Whether a later epoch answers for a stop that took effect in an earlier one."""
        outcome = receipt.get("outcome") or {}
        return (
            not self.resolved
            and self.receipt.get("turn_effective") is not None
            and receipt.get("epoch") != self.receipt.get("epoch")
            and outcome.get("unknown", 0) > 0
            and sum(outcome.values()) == outcome["unknown"]
        )

    def pending_on(self) -> list[str]:
        """What holds it up."""
        if self.resolved:
            return []
        named = [str(hold) for hold in self.receipt.get("pending_on") or []]
        return named or [f"{self.group}: {_WAITS_FOR[self.status]}"]

    def to_json(self) -> dict[str, Any]:
        """As an element of ``groups``."""
        receipt = self.receipt
        return {
            "group": self.group,
            "epoch": receipt.get("epoch"),
            "turn_effective": receipt.get("turn_effective"),
            **{key: receipt.get(key) or 0 for key in _COUNTS},
            "ranks": [
                {key: rank.get(key) for key in _RANK_KEYS} for rank in receipt.get("ranks") or []
            ],
        }


_WAITS_FOR = {
    StopStatus.ACCEPTED: "no rank has noticed it",
    StopStatus.NOTICED: "its turn",
    StopStatus.STOPPED: "holds to end",
}


class StopRecord:
    """One stop. ``span`` is its place in the trace, ``notify_id`` the span id of its notify.

    A ``remote`` one was accepted by another gateway, and is known here by its receipts only.
    """

    def __init__(self, stop: Stop, span: Trace, notify_id: str, *, remote: bool = False) -> None:
        self.stop = stop
        self.remote = remote
        self.span = span
        self.notify_id = notify_id
        self.parts: dict[str, Part] = {}
        self.matched: list[Request] = []  # of this gateway, up to REQUEST_IDS_MAX
        self.matched_count = 0
        self._live: dict[str, str] = {}  # of all that match, those that have not ended: its group
        self._live_at: Counter[str] = Counter()  # how many of them, by group
        self._stopped_at: set[str] = set()  # groups at which the others were stopped
        self._refused_at: set[str] = set()  # those that refused one of them
        self.here = {str(outcome): 0 for outcome in Outcome}  # of them: that no leader answers for
        self.stopped_here = False
        self.told: StopStatus | None = None  # to the other gateways, of this one's part
        self.tenants: set[str] = set()
        self.traced: set[str] = set()
        self._changed = asyncio.Event()

    def add_match(self, request: Request, *, listed: bool = True) -> None:
        """A request of this gateway that the stop is aimed at.

        One that is ``listed`` has the stop among its own, so that its end is told here.
        """
        self.matched_count += 1
        self.tenants.add(request.tenant)
        if len(self.matched) < REQUEST_IDS_MAX:
            self.matched.append(request)
        if request.outcome is None and listed and request.uid not in self._live:
            self._live[request.uid] = request.group
            self._live_at[request.group] += 1

    def end(self, request: Request) -> None:
        """A request that matched has its outcome."""
        group = self._live.pop(request.uid, None)
        if group is None:
            return
        self._live_at[group] -= 1
        if request.refused or not request.dispatched:
            # No leader had it, so that no leader answers for it.
            self.stopped_here = True
            self.here[str(request.outcome)] += 1
            if request.refused:
                self._refused_at.add(group)
        elif request.outcome is Outcome.STOPPED:
            self._stopped_at.add(group)

    @property
    def status_here(self) -> StopStatus:
        """How far the requests of this gateway are, apart from what their leaders say."""
        if self._live:
            return StopStatus.NOTICED
        return StopStatus.RECLAIMED if self.stopped_here else StopStatus.ALREADY_FINISHED

    @property
    def answering(self) -> list[str]:
        """The groups whose leaders answer for requests of this gateway."""
        live = {group for group, count in self._live_at.items() if group and count}
        return sorted(live | self._stopped_at)

    @property
    def status(self) -> StopStatus:
        """How far it has come everywhere: the least of its parts."""
        answering = self._answering_elsewhere()
        states = [
            self._status_of(part, part.group in answering)
            for part in self.parts.values()
            if not self._is_moot(part)
        ]
        if self.stopped_here:
            states.append(StopStatus.RECLAIMED)
        active = [state for state in states if state is not StopStatus.ALREADY_FINISHED]
        return min(active, key=_ORDER.index) if active else StopStatus.ALREADY_FINISHED

    def _answering_elsewhere(self) -> set[str]:
        """The groups that had requests of other gateways, as those say."""
        return {group for part in self.parts.values() for group in part.groups}

    def _is_moot(self, part: Part) -> bool:
        """Whether it is a gateway's that may owe a last word, and that word says nothing more.

        All its groups have answered. That gateway, or Redis, may be gone before it could say so.
        """
        if part.resolved or not part.defers:
            return False
        answers = [self.parts.get(group) for group in part.groups]
        return all(answer is not None and answer.resolved for answer in answers) and not any(
            answer is not None and answer.unknown for answer in answers
        )

    def _status_of(self, part: Part, answering: bool) -> StopStatus:
        """How far a part has come, also where its receipt has overtaken what it is about.

        Where the stop came before its request, it takes effect when that comes, and another receipt
        says so; until then nothing is proved. One that had finished never comes. Nor does one that
        was refused: if it was the stop that ended it, then nothing of it was ever held.
        """
        overtaken = part.unknown and (answering or part.group in self._stopped_at)
        if overtaken or self._owes_an_end(part):
            return StopStatus.NOTICED
        refused = part.unknown and part.group in self._refused_at
        return StopStatus.RECLAIMED if refused else part.status

    def _owes_an_end(self, part: Part) -> bool:
        """Whether a part has overtaken, by Redis, the ends on its leader's session.

        Who waits for the stop may ask for its requests next, and they must have their outcome.
        """
        return part.status not in _BEFORE_ITS_TURN and self._live_at[part.group] > 0

    def _pending_on(self, part: Part, answering: set[str]) -> list[str]:
        if self._is_moot(part):
            return []
        held = part.pending_on()
        if self._owes_an_end(part):
            held.append(f"{part.group}: {END_OWED}")
        elif part.unknown and part.group in answering | self._stopped_at:
            held.append(f"{part.group}: its request, which it has not heard of")
        return held

    def unnamed(self) -> list[Part]:
        """Take out the parts of groups that were told for a gateway which no longer names them.

        What it had there came to nothing: nobody owes anything.
        """
        named = self._answering_elsewhere()
        parts = self.parts.values()
        gone = [p for p in parts if p.named_only and not p.receipt and p.group not in named]
        for part in gone:
            del self.parts[part.group]
        return gone

    @property
    def resolved(self) -> bool:
        """Whether every part is."""
        return self.status in RESOLVED

    @property
    def known(self) -> bool:
        """Whether anybody knows what it is aimed at."""
        return self.matched_count > 0 or any(
            part.receipt and not part.unknown for part in self.parts.values()
        )

    def reached(self, level: StopStatus) -> bool:
        """Whether it has come to ``level``, or further."""
        status = self.status
        return status in RESOLVED or _ORDER.index(status) >= _ORDER.index(level)

    def touch(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, level: StopStatus, timeout_s: float) -> bool:
        """Wait for ``level``, at most so long; whether it came."""
        return await self._wait(lambda: self.reached(level), timeout_s)

    async def wait_known(self, timeout_s: float) -> bool:
        """Wait until somebody knows what it is aimed at."""
        return await self._wait(lambda: self.known, timeout_s)

    async def _wait(self, done: Any, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not done():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                return bool(done())
        return True

    def _request_ids(self) -> list[str]:
        ids = dict.fromkeys(request.uid for request in self.matched)
        for part in self.parts.values():
            if not part.unknown:
                # A child of n > 1 has its parent's id in front of the dot.
                ids.update(
                    dict.fromkeys(str(i).split(".")[0] for i in part.receipt.get("request_ids", ()))
                )
        if self.stop.target.uids:
            ids.update(dict.fromkeys(self.stop.target.uids))
        return list(ids)[:REQUEST_IDS_MAX]

    def _count(self, ids: list[str]) -> int:
        if self.stop.target.uids:
            return len(self.stop.target.uids)
        told = sum(int(part.receipt.get("count") or 0) for part in self.parts.values())
        if len(ids) < REQUEST_IDS_MAX:
            return len(ids)
        return max(self.matched_count, told + sum(self.here.values()))

    def _outcome(self, count: int) -> str | dict[str, int] | None:
        totals = dict(self.here)
        if count == 1 and self.matched and self.matched[0].outcome is not None:
            return str(self.matched[0].outcome)
        for part in self.parts.values():
            for key, value in part.outcome.items():
                if key in totals:
                    totals[key] += value
        if count == 1:
            # Of several choices the worst, as for the request itself.
            return next((o for o in ("failed", "stopped", "finished") if totals[o]), None)
        return totals

    def shown(self) -> list[Part]:
        """The parts that have something to say of the requests."""
        return [part for part in self.parts.values() if not part.unknown and not part.defers]

    def to_json(self) -> dict[str, Any]:
        """The answer: the sum, then each group's part."""
        ids = self._request_ids()
        count = self._count(ids)
        answering = self._answering_elsewhere()
        pending = [hold for p in self.parts.values() for hold in self._pending_on(p, answering)]
        return {
            "stop_id": self.stop.stop_id,
            "request_ids": ids,
            "count": count,
            "reason": str(self.stop.reason),
            "status": str(self.status),
            "outcome": self._outcome(count),
            "trace_id": self.span.trace_id,
            "accepted_at": None if self.remote else self.stop.issued_at,
            "pending_on": pending,
            "groups": [part.to_json() for part in self.shown()],
        }
