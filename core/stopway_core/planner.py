"""The planner: the one brain of a group. It alone decides; turns tell everybody what.

``turn(now, events)`` takes what happened and returns what to do. It reads no clock and blocks on
nothing. Order inside a turn: results, stops, reports, deadlines, admissions, plan. So a request
that a result of this turn finishes is finished, and its stop is answered "already finished".

The planner changes the leader's own replica as it composes the turn; followers reach the same
state by ``Replica.apply``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from stopway_core.admission import (
    REFUSE_DRAIN,
    capacity_refusal,
    length_max,
    refusal,
    tightest,
)
from stopway_core.composing import Composing
from stopway_core.config import PlannerConfig
from stopway_core.deadlines import DeadlineHeap
from stopway_core.delivery import Delivery
from stopway_core.endings import Endings
from stopway_core.events import (
    Accepted,
    Compiled,
    Completed,
    DrainStarted,
    Event,
    Hit,
    LeaseLost,
    Mode,
    ModeChanged,
    Outputs,
    Refused,
    StopSignal,
    Submit,
)
from stopway_core.grammars import GrammarBook
from stopway_core.lifecycle import Event as Life
from stopway_core.policy import Order
from stopway_core.receipts import ReceiptBook
from stopway_core.replica import Replica, StopApplied
from stopway_core.requests import Choice, RequestTable
from stopway_core.schedule import Schedule
from stopway_core.stopping import Stopping
from stopway_core.turn import Turn
from stopway_core.types import Reason, StepWork, Submission

DIGEST_EVERY = 64  # turns between two comparisons of the replicas' digests


@dataclass(slots=True)
class Planned:
    """What one call of ``turn`` decided."""

    turn: Turn
    work: StepWork | None
    stops: list[StopApplied]
    outputs: Outputs


class Planner:
    """Waiting requests, deadlines, tombstones and receipts of one group, for one epoch."""

    def __init__(self, config: PlannerConfig, replica: Replica, receipts: ReceiptBook) -> None:
        self.config = config
        self.replica = replica
        self.receipts = receipts
        self.requests = RequestTable(memory_s=2 * config.submit_age_s)
        self.mode = Mode.RUNNING
        self.draining = False  # to leave; a mode can be changed back
        self._drain_until: float | None = None
        self._deadlines = DeadlineHeap()
        self.schedule = Schedule(config, replica, self._deadlines)
        self._grammars = GrammarBook(replica)
        self._endings = Endings(
            replica, receipts, self.requests, self._deadlines, self.schedule, self._grammars
        )
        self._stopping = Stopping(
            config,
            replica,
            receipts,
            self.requests,
            self.schedule,
            self._grammars,
            self._endings,
        )
        self._delivery = Delivery(config, replica, self.schedule, self._deadlines, self._endings)
        self._next_key = 1

    # --- what others may look at ---------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the replicas."""
        return self.schedule.running

    @property
    def waiting(self) -> int:
        """Sequences that are not in the replicas: queued, or waiting for a grammar or a sibling."""
        return len(self.requests.by_key) - self.schedule.running

    @property
    def drafted_tokens(self) -> int:
        """Guesses that completed steps have verified, delivered or not."""
        return self._delivery.drafted_tokens

    @property
    def accepted_tokens(self) -> int:
        """Of them, those that were right."""
        return self._delivery.accepted_tokens

    @property
    def drained(self) -> bool:
        """Whether a drain has nothing left to wait for, on any rank.

        A result comes from one rank. The others may still be in its step, and a rank that leaves
        then never says that what was stopped came back.
        """
        if not self.draining or self.requests.by_key or self.replica.in_flight:
            return False
        return self.receipts.settled(self.replica.step)

    def next_timer(self) -> float | None:
        """When a turn is due even if nothing happens; ``None`` when nothing waits for time."""
        timer = self._deadlines.next()
        if self._drain_until is not None and self.requests.by_key:
            timer = self._drain_until if timer is None else min(timer, self._drain_until)
        return timer

    # --- the turn ------------------------------------------------------------------------

    def turn(self, now: float, events: list[Event]) -> Planned | None:
        """Take ``events`` and plan. ``None`` when there is nothing that a replica must do.

        Outputs for the front are lost with ``None``, so it is returned only when there are none.
        """
        turn = Turn(self.replica.turn + 1)
        if turn.number % DIGEST_EVERY == 0:
            turn.digest = self.replica.digest
        composing = Composing(now, turn)
        self._delivery.take([e.result for e in events if isinstance(e, Completed)], composing)
        for event in events:
            if isinstance(event, Compiled):
                self._compiled(event, composing)
        fifo = self.config.policy.order is Order.FIFO
        for event in () if fifo else events:
            self._signal(event, composing)
        for event in events:
            if isinstance(event, Hit):
                self._hit(event, composing)
        self._expire(composing)
        if fifo:
            for event in events:
                if isinstance(event, Submit):
                    self._submit(event.submission, composing)
                else:
                    self._signal(event, composing)
        else:
            self._submissions(events, composing)
        self._stopping.sweep(self.mode, composing)
        work = self._plan(composing)
        if turn.empty and composing.outputs.empty and not composing.marks:
            return None
        stops = self._stopping.close(composing)
        self.replica.close(turn.number)
        return Planned(turn, work, stops, composing.outputs)

    def _signal(self, event: Event, composing: Composing) -> None:
        """What ends requests, or changes what may run, from outside."""
        if isinstance(event, StopSignal):
            self._stopping.stop(event.stop, composing)
        elif isinstance(event, LeaseLost):
            self._stopping.lease_lost(event, composing)
        elif isinstance(event, DrainStarted):
            self.draining = True
            self._drain_until = event.until
        elif isinstance(event, ModeChanged):
            self.mode = event.mode
            if event.mode is Mode.ABORTED:
                self._endings.end_all(Reason.ADMIN, composing)

    def _plan(self, composing: Composing) -> StepWork | None:
        mode = self.mode
        if mode is Mode.FROZEN:
            return None
        work = self.schedule.plan(
            composing.now,
            composing.turn,
            admits=mode in (Mode.RUNNING, Mode.DRAINING),
            started=mode is Mode.WAITING,
        )
        for choice in self.schedule.victims:
            self._endings.end(choice, Reason.PREEMPTED, composing)
        return work

    # --- reports and time ----------------------------------------------------------------

    def _compiled(self, event: Compiled, composing: Composing) -> None:
        """A grammar is ready, or it never will be: for all who wait for it."""
        if event.error:
            message = f"the grammar cannot be compiled: {event.error}"
            for choice in self._grammars.failed(event.slot, composing.turn):
                self._endings.end(choice, Reason.BAD_INPUT, composing, message=message)
            return
        choices = self._grammars.compiled(event.slot, composing.turn)
        for _, group in groupby(choices, key=lambda choice: choice.submission.uid):
            ready = list(group)
            for choice in ready:
                self._ready(choice, composing.now)
            self.schedule.queue(ready)

    def _ready(self, choice: Choice, now: float) -> None:
        choice.move(Life.READY)
        choice.ready_at = now

    def _hit(self, hit: Hit, composing: Composing) -> None:
        choice = self.requests.by_key.get(hit.key)
        if choice is not None:
            self._endings.end(choice, Reason.STOP_STRING, composing, keep=hit.keep)

    def _expire(self, composing: Composing) -> None:
        now = composing.now
        for key, reason in self._deadlines.due(now):
            choice = self.requests.by_key.get(key)
            # A deadline of the queue is met by having left it, if only for a while.
            if choice is None or (reason is Reason.DEADLINE_QUEUE and choice.admitted_at):
                continue
            self._endings.end(choice, reason, composing)
        if self._drain_until is not None and now >= self._drain_until:
            self._endings.end_all(Reason.DRAIN, composing)
        self.requests.expire(now)

    # --- admission -----------------------------------------------------------------------

    def _submissions(self, events: list[Event], composing: Composing) -> None:
        """Queue what was submitted.

        What ends requests by a selector, or with their gateway, and came after a submission of
        the same batch covers it too.
        """
        submitted = False
        for event in events:
            if isinstance(event, Submit):
                self._submit(event.submission, composing)
                submitted = True
            elif submitted and isinstance(event, LeaseLost):
                self._stopping.lease_lost(event, composing)
            elif submitted and isinstance(event, StopSignal) and not event.stop.target.uids:
                self._stopping.came_with(event.stop, composing)

    def _submit(self, submission: Submission, composing: Composing) -> None:
        refused = self._refusal(composing.now, submission)
        if refused is not None:
            composing.outputs.refused.append(refused)
            return
        choices = self._choices(submission, composing.now)
        ready = True
        for choice in choices:
            if submission.grammar:
                ready = self._grammars.join(choice, composing.turn)
                if ready:
                    self._ready(choice, composing.now)
        self.requests.add(choices)
        if ready:
            self.schedule.queue(choices)
        keys = tuple(choice.key for choice in choices)
        composing.outputs.accepted.append(Accepted(submission.uid, keys))
        self._stopping.born(choices, composing)

    def _choices(self, submission: Submission, now: float) -> list[Choice]:
        """The choices of a submission, their clocks started."""
        config = self.config
        longest = length_max(submission, config.max_model_len, self.replica)
        enders = frozenset(submission.params.stop_token_ids)
        if submission.grammar or not submission.params.ignore_eos:
            enders |= config.eos_ids
        deadlines = tightest(submission.deadlines, config.deadlines)
        choices = []
        for index in range(submission.choices):
            choice = Choice(self._next_key, submission, index, now, longest)
            choice.enders = enders
            self._next_key += 1
            self._deadlines.add(choice.key, now, deadlines)
            choices.append(choice)
        return choices

    def _refusal(self, now: float, submission: Submission) -> Refused | None:
        """Why a submission can't be queued, before anything is computed for it."""
        refused = refusal(now, submission, self.config, self.requests)
        if refused is None and (self.draining or self.mode is Mode.DRAINING):
            refused = Refused(submission.uid, 503, "drain", REFUSE_DRAIN)
        return (
            refused
            or capacity_refusal(submission, self.replica, self.waiting, self.config.max_waiting)
            or self._grammars.refusal(submission)
        )
