"""Where a request can be, what can end it there, and how often a run met each combination.

The observed planner is the real one; it only counts before it does what it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any

from stopway_core.composing import Composing
from stopway_core.events import Compiled, Event
from stopway_core.lifecycle import Event as Life
from stopway_core.lifecycle import State
from stopway_core.planner import Planned, Planner
from stopway_core.requests import Choice
from stopway_core.types import Reason, StepWork, Stop


class Place(StrEnum):
    """Where a stop may find a request."""

    UNBORN = "not yet there"
    COMPILING = "compiling"
    QUEUED = "queued"
    SIBLING = "waiting for a sibling"
    PREEMPTED = "preempted"
    STALE = "preempted, tokens in flight"
    BETWEEN = "prefilling, between chunks"
    PREFILLING = "prefilling, in flight"
    IDLE = "decoding, idle"
    DECODING = "decoding, in flight"
    DRAFT = "decoding, drafts in flight"
    OVERLAPPED = "decoding, two steps in flight"
    ENDED = "ended"


class Cause(StrEnum):
    """What ends a request."""

    UID = "stop by uid"
    SELECTOR = "stop by selector"
    LEASE = "lease lost"
    QUEUE = "queue deadline"
    FIRST_TOKEN = "first token deadline"
    TOTAL = "total deadline"
    DRAIN = "drain"
    ABORT = "pause abort"
    RANK = "rank lost"
    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop string"
    GRAMMAR_END = "grammar end"
    REJECTED = "grammar rejects"
    UNCOMPILED = "grammar fails"
    POLICY = "preempted for good"


_CAUSES = {
    Reason.CLIENT_DISCONNECT: Cause.LEASE,
    Reason.DEADLINE_QUEUE: Cause.QUEUE,
    Reason.DEADLINE_TTFT: Cause.FIRST_TOKEN,
    Reason.DEADLINE_TOTAL: Cause.TOTAL,
    Reason.DRAIN: Cause.DRAIN,
    Reason.ADMIN: Cause.ABORT,  # one by a stop says so before
    Reason.EOS: Cause.EOS,
    Reason.LENGTH: Cause.LENGTH,
    Reason.STOP_STRING: Cause.STOP_STRING,
    Reason.GRAMMAR_END: Cause.GRAMMAR_END,
    Reason.BAD_INPUT: Cause.UNCOMPILED,
    Reason.PREEMPTED: Cause.POLICY,
}

_WAITING = (Place.COMPILING, Place.QUEUED, Place.SIBLING)
_AGAIN = (Place.PREEMPTED, Place.STALE)
_PREFILL = (Place.BETWEEN, Place.PREFILLING)
_DECODE = (Place.IDLE, Place.DECODING, Place.DRAFT, Place.OVERLAPPED)
ALIVE = (*_WAITING, *_AGAIN, *_PREFILL, *_DECODE)
RARE = (*_AGAIN, Place.DRAFT, Place.OVERLAPPED)
"""Between turns few are there, or for a short time."""

POSSIBLE: dict[Cause, tuple[Place, ...]] = {
    Cause.UID: (Place.UNBORN, *ALIVE, Place.ENDED),
    Cause.SELECTOR: ALIVE,
    Cause.LEASE: ALIVE,
    Cause.QUEUE: _WAITING,
    Cause.FIRST_TOKEN: (*_WAITING, *_AGAIN, *_PREFILL),
    Cause.TOTAL: ALIVE,
    Cause.DRAIN: ALIVE,
    Cause.ABORT: ALIVE,
    Cause.RANK: ALIVE,
    # A result ends a request: its row is in flight no more, though an overlapped one may be.
    Cause.EOS: (Place.PREEMPTED, Place.IDLE, Place.DECODING),
    Cause.LENGTH: (Place.PREEMPTED, Place.IDLE),
    Cause.STOP_STRING: (*_AGAIN, *_PREFILL, *_DECODE),
    Cause.GRAMMAR_END: (Place.PREEMPTED, Place.IDLE, Place.DECODING),
    Cause.REJECTED: (Place.IDLE,),
    Cause.UNCOMPILED: (Place.COMPILING,),
    Cause.POLICY: (),
}
"""The places in which each cause can meet a request, of a policy that ends it at once."""


def place_of(planner: Planner, choice: Choice) -> Place:
    """Where a living choice is now."""
    schedule, replica = planner.schedule, planner.replica
    if choice.state is State.COMPILING:
        return Place.COMPILING
    seq = choice.seq
    if seq is None:
        if choice.preemptions:
            stale = choice.rid in schedule.stale and choice.stale_step > replica.processed
            return Place.STALE if stale else Place.PREEMPTED
        return Place.SIBLING if choice.key in schedule._first else Place.QUEUED
    if choice.state is State.PREFILLING:
        return Place.PREFILLING if seq.last_step > replica.processed else Place.BETWEEN
    if not seq.pending:
        return Place.IDLE
    if seq.pending > 1:
        return Place.OVERLAPPED
    flight = replica.in_flight[seq.last_step]
    drafts = any(other is seq and samples > 1 for other, _, samples in flight.rows)
    return Place.DRAFT if drafts else Place.DECODING


class ObservedPlanner(Planner):
    """The planner, with a count of what it met."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.met: Counter[tuple[Place, Cause]] = Counter()
        self.taken: Counter[tuple[State, Life]] = Counter()
        self._cause: Cause | None = None
        self._born = False
        self._followers: set[int] = set()  # who waited for a sibling when the turn began
        _watch(self._endings, "end", self._ends)
        _watch(self._stopping, "_choice", self._stops_choice)
        _watch(self._stopping, "_uid", self._stops_uid)
        _watch(self._stopping, "born", self._stops_born)
        _watch(self.schedule, "first_token", self._has_first_token)

    def turn(self, now: float, events: list[Event]) -> Planned | None:
        self._followers = set(self.schedule._first)
        return super().turn(now, events)

    def lost(self) -> None:
        """The group's processes are gone, and so is everybody who was alive."""
        for choice in self.requests.by_key.values():
            self.met[place_of(self, choice), Cause.RANK] += 1

    def _ends(self, end: Call, choice: Choice, reason: Reason, *args: Any, **kw: Any) -> Any:
        place = Place.UNBORN if self._born else place_of(self, choice)
        if place is Place.QUEUED and choice.key in self._followers and not choice.fork:
            place = Place.SIBLING  # until this turn ended the one before it
        self.met[place, self._cause or self._why(choice, reason)] += 1
        self.taken[choice.state, Life.END] += 1
        return end(choice, reason, *args, **kw)

    @staticmethod
    def _why(choice: Choice, reason: Reason) -> Cause:
        mark = choice.mark
        if mark is None:
            rejected = reason is Reason.BAD_INPUT and choice.state is not State.COMPILING
            return Cause.REJECTED if rejected else _CAUSES[reason]
        if not mark.stops:
            return Cause.LEASE
        return Cause.UID if mark.stops[0].target.uids else Cause.SELECTOR

    def _stops_choice(self, stops: Call, choice: Choice, stop: Stop, *args: Any) -> Any:
        self._cause = Cause.UID if stop.target.uids else Cause.SELECTOR
        stops(choice, stop, *args)
        self._cause = None

    def _stops_uid(self, stops: Call, uid: str, stop: Stop, *args: Any) -> Any:
        if not self.requests.live(uid) and self.requests.finished(uid) is not None:
            self.met[Place.ENDED, Cause.UID] += 1
        return stops(uid, stop, *args)

    def _stops_born(self, stops: Call, *args: Any) -> Any:
        self._born = True
        stops(*args)
        self._born = False

    def _has_first_token(self, first_token: Call, rid: int) -> Any:
        self.taken[State.PREFILLING, Life.TOKEN] += 1
        return first_token(rid)

    def _compiled(self, event: Compiled, composing: Composing) -> None:
        before = self._compiling()
        super()._compiled(event, composing)
        if not event.error:
            self.taken[State.COMPILING, Life.READY] += before - self._compiling()

    def _compiling(self) -> int:
        return sum(c.state is State.COMPILING for c in self.requests.by_key.values())

    def _plan(self, composing: Composing) -> StepWork | None:
        schedule = self.schedule
        states = dict.fromkeys(schedule.prefilling, State.PREFILLING)
        states |= dict.fromkeys(schedule.decoding, State.DECODING)
        work = super()._plan(composing)
        self.taken[State.QUEUED, Life.ADMIT] += len(composing.turn.admits)
        for rid in composing.turn.preempts:
            self.taken[states[rid], Life.PREEMPT] += 1
        return work


Call = Callable[..., Any]


def _watch(part: Any, name: str, watcher: Call) -> None:
    """Have ``watcher`` called, with the method and its arguments, in a method's place."""
    setattr(part, name, partial(watcher, getattr(part, name)))
