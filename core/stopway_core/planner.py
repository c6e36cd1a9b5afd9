"""The planner: the one brain of a group. It alone decides; turns tell everybody what.

``turn(now, events)`` takes what happened and returns what to do. It reads no clock and blocks on
nothing. Order inside a turn: results, stops, reports, deadlines, admissions, plan. So a request
that a result of this turn finishes is finished, and its stop is answered "already finished".

The planner changes the leader's own replica as it composes the turn; followers reach the same
state by ``Replica.apply``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from stopway_core.admission import (
    REFUSE_DRAIN,
    capacity_refusal,
    length_max,
    refusal,
    tightest,
)
from stopway_core.deadlines import DeadlineHeap
from stopway_core.events import (
    Accepted,
    Compiled,
    Completed,
    DrainStarted,
    Ended,
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
from stopway_core.ledger import Dropped
from stopway_core.lifecycle import Event as Life
from stopway_core.marks import Mark, effect_on, is_due
from stopway_core.policies import POLICIES
from stopway_core.policy import Effect, Order, Policy
from stopway_core.receipts import Receipt, ReceiptBook
from stopway_core.replica import Replica, StopApplied, stop_applied
from stopway_core.requests import Choice, RequestTable
from stopway_core.schedule import Schedule
from stopway_core.sequence import Seq
from stopway_core.turn import Sampled, StopEntry, Turn
from stopway_core.types import (
    DROPPED,
    REJECTED,
    Deadlines,
    Logprobs,
    Reason,
    StepResult,
    StepWork,
    Stop,
    Submission,
    outcome_of,
)

NO_DEADLINES = Deadlines()
DIGEST_EVERY = 64  # turns between two comparisons of the replicas' digests


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Bounds of one group. Times in seconds."""

    max_model_len: int
    eos_ids: frozenset[int] = frozenset()
    max_running: int = 256
    max_waiting: int = 16_384
    max_batch_tokens: int = 512  # tokens of the steps in flight, decodes and prefill chunks
    stages: int = 1  # of the pipeline
    window: int = 1  # steps in flight; above 1, one stage overlaps steps, several take turns
    draft_tokens: int = 0  # of one proposal, at most; 0: no drafts
    deadlines: Deadlines = NO_DEADLINES  # of the service; a request's own can be tighter
    submit_age_s: float = 30.0
    policy: Policy = field(default_factory=lambda: POLICIES["native"])

    @property
    def step_tokens(self) -> int:
        """Tokens of one step at most."""
        return -(-self.max_batch_tokens // self.stages)


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
        self.drafted_tokens = 0  # verified by completed steps, delivered or not
        self.accepted_tokens = 0
        self._drain_until: float | None = None
        self._deadlines = DeadlineHeap()
        self._schedule = Schedule(config, replica, self._deadlines)
        self._grammars = GrammarBook(replica)
        self._marked: dict[int, Choice] = {}  # by key: stops that are yet to take effect
        self._next_key = 1

    # --- what others may look at ---------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the replicas."""
        return self._schedule.running

    @property
    def waiting(self) -> int:
        """Sequences that are not in the replicas: queued, or waiting for a grammar or a sibling."""
        return len(self.requests.by_key) - self._schedule.running

    @property
    def drained(self) -> bool:
        """Whether a drain has nothing left to wait for."""
        return self.draining and not self.requests.by_key and not self.replica.in_flight

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
        composing = _Composing(turn, Outputs())
        self._results(now, [e.result for e in events if isinstance(e, Completed)], composing)
        for event in events:
            if isinstance(event, Compiled):
                self._compiled(now, event, composing)
        fifo = self.config.policy.order is Order.FIFO
        for event in () if fifo else events:
            self._signal(now, event, composing)
        for event in events:
            if isinstance(event, Hit):
                self._hit(now, event, composing)
        self._expire(now, composing)
        if fifo:
            for event in events:
                if isinstance(event, Submit):
                    self._submit(now, event.submission, composing)
                else:
                    self._signal(now, event, composing)
        else:
            self._submissions(now, events, composing)
        self._sweep(now, composing)
        work = self._plan(now, composing)
        if turn.empty and composing.outputs.empty and not composing.marks:
            return None
        stops = self._close_stops(composing)
        self.replica.close(turn.number)
        return Planned(turn, work, stops, composing.outputs)

    def _signal(self, now: float, event: Event, composing: _Composing) -> None:
        """What ends requests, or changes what may run, from outside."""
        if isinstance(event, StopSignal):
            self._stop(now, event.stop, composing)
        elif isinstance(event, LeaseLost):
            self._lease_lost(now, event, composing)
        elif isinstance(event, DrainStarted):
            self.draining = True
            self._drain_until = event.until
        elif isinstance(event, ModeChanged):
            self.mode = event.mode
            if event.mode is Mode.ABORTED:
                self._end_all(now, Reason.ADMIN, composing)

    def _plan(self, now: float, composing: _Composing) -> StepWork | None:
        mode = self.mode
        if mode is Mode.FROZEN:
            return None
        work = self._schedule.plan(
            now,
            composing.turn,
            admits=mode in (Mode.RUNNING, Mode.DRAINING),
            started=mode is Mode.WAITING,
        )
        for choice in self._schedule.victims:
            self._end(now, choice, Reason.PREEMPTED, composing)
        return work

    # --- results -------------------------------------------------------------------------

    def _results(self, now: float, results: list[StepResult], composing: _Composing) -> None:
        """Deliver what completed steps sampled, then end whom that finishes.

        All results come before all ends, in the turn as here, so that every replica sees the same
        requests alive while it confirms the steps.
        """
        ending: dict[int, _Ending] = {}  # by key
        for result in results:
            sampled = Sampled(result.step, result.tokens, result.counts)
            composing.turn.results.append(sampled)
            at = 0
            for seq, samples, tokens in self.replica.results(sampled):
                choice = self._whose(now, seq, samples, tokens)
                if choice is not None and choice.key not in ending:
                    found = self._deliver(choice, tokens, result.logprobs, at, composing.outputs)
                    if found is not None:
                        ending[choice.key] = found
                at += len(tokens)
        for end in ending.values():
            self._end(now, end.choice, end.reason, composing, keep=end.keep, message=end.message)

    def _whose(self, now: float, seq: Seq, samples: int, tokens: list[int]) -> Choice | None:
        """Whom a row's tokens are for; ``None`` when its end counts them as discarded."""
        schedule = self._schedule
        if samples > 1 and tokens[-1] != DROPPED:
            self.drafted_tokens += samples - 1
            self.accepted_tokens += len(tokens) - 1
        choice = schedule.decoding.get(seq.rid)
        if choice is None and seq.live:
            choice = self._first_token(now, seq.rid)
        elif choice is None:
            choice = schedule.stale.get(seq.rid)
            if choice is None or tokens[-1] < 0:
                return None
            # What was in flight at a preemption need not be computed again.
            choice.wasted_tokens -= 1
            choice.tokens.extend(tokens)
            self._has_token(now, choice)
        if samples > 1:
            choice.drafted_tokens += samples - 1
            choice.accepted_tokens += len(tokens) - 1
            if choice.drafter is not None:
                choice.drafter.verified(samples - 1, len(tokens) - 1)
        return choice

    def _first_token(self, now: float, rid: int) -> Choice:
        choice = self._schedule.first_token(rid)
        choice.move(Life.TOKEN)
        self._has_token(now, choice)
        return choice

    def _has_token(self, now: float, choice: Choice) -> None:
        if not choice.first_token_at:
            choice.first_token_at = now
            self._deadlines.met_first_token(choice.key)

    def _deliver(
        self,
        choice: Choice,
        tokens: list[int],
        logprobs: list[Logprobs | None],
        at: int,
        outputs: Outputs,
    ) -> _Ending | None:
        """Pass on ``tokens``, which its sequence has already; say whether they end it."""
        rejected = tokens[-1] == REJECTED
        if rejected:
            tokens = tokens[:-1]
        mark = choice.mark
        silent = mark is not None and mark.keep is not None
        produced = choice.output_len - len(tokens)
        for index, token in enumerate(tokens):
            produced += 1
            if not silent:
                outputs.keys.append(choice.key)
                outputs.tokens.append(token)
                outputs.logprobs.append(logprobs[at + index] if logprobs else None)
            if token in choice.enders and produced >= choice.params.min_tokens:
                reason = Reason.GRAMMAR_END if choice.submission.grammar else Reason.EOS
                return _Ending(choice, reason, produced)
        if len(choice.tokens) >= choice.length_max:
            return _Ending(choice, Reason.LENGTH, produced)
        if rejected:
            message = "the grammar allows no token that the model could go on with"
            return _Ending(choice, Reason.ENGINE_ERROR, produced, message)
        return None

    def _compiled(self, now: float, event: Compiled, composing: _Composing) -> None:
        """A grammar is ready, or it never will be: for all who wait for it."""
        if event.error:
            for choice in self._grammars.failed(event.slot, composing.turn):
                message = f"the grammar cannot be compiled: {event.error}"
                self._end(now, choice, Reason.BAD_INPUT, composing, message=message)
            return
        choices = self._grammars.compiled(event.slot, composing.turn)
        for _, group in groupby(choices, key=lambda choice: choice.submission.uid):
            ready = list(group)
            for choice in ready:
                choice.move(Life.READY)
                choice.ready_at = now
            self._schedule.queue(ready)

    # --- ends ----------------------------------------------------------------------------

    def _end(
        self,
        now: float,
        choice: Choice,
        reason: Reason,
        composing: _Composing,
        *,
        keep: int | None = None,
        message: str = "",
    ) -> tuple[int, int]:
        """Give a choice its one outcome and let go of all that it holds.

        Returns (rid, or 0 when it held nothing; tokens discarded).
        """
        mark = choice.mark
        if mark is not None:  # its stop came first, whatever ends it now
            self._unmark(choice, mark, composing)
            reason, keep = mark.reason, mark.keep
        rid = choice.rid if choice.seq is not None else 0
        discarded = choice.wasted_tokens
        if choice.seq is not None:
            discarded += choice.seq.pending
            choice.cached_tokens = max(choice.cached_tokens, choice.seq.cached_tokens)
            composing.drops[rid] = self.replica.end(rid)
            composing.turn.ends.append(rid)
            choice.seq = None
        self._schedule.leave(choice)
        if choice.submission.grammar:
            self._grammars.leave(choice, composing.turn)
        produced = choice.output_len
        keep = produced if keep is None else min(keep, produced)
        discarded += produced - keep
        choice.move(Life.END)
        outcome = outcome_of(reason)
        self._deadlines.forget(choice.key)
        self.requests.remove(choice, outcome, now)
        composing.outputs.ended.append(
            Ended(
                key=choice.key,
                uid=choice.submission.uid,
                index=choice.index,
                outcome=outcome,
                reason=reason,
                prompt_tokens=len(choice.submission.prompt),
                keep=keep,
                cached_tokens=choice.cached_tokens,
                discarded_tokens=discarded,
                preemptions=choice.preemptions,
                drafted_tokens=choice.drafted_tokens,
                accepted_tokens=choice.accepted_tokens,
                queued_at=choice.queued_at,
                ready_at=choice.ready_at,
                admitted_at=choice.admitted_at,
                first_token_at=choice.first_token_at,
                ended_at=now,
                traceparent=choice.submission.traceparent,
                message=message,
            )
        )
        return rid, discarded

    def _hit(self, now: float, hit: Hit, composing: _Composing) -> None:
        choice = self.requests.by_key.get(hit.key)
        if choice is not None:
            self._end(now, choice, Reason.STOP_STRING, composing, keep=hit.keep)

    def _end_all(self, now: float, reason: Reason, composing: _Composing) -> None:
        for choice in list(self.requests.by_key.values()):
            self._end(now, choice, reason, composing)

    # --- stops ---------------------------------------------------------------------------

    def _stop(self, now: float, stop: Stop, composing: _Composing) -> None:
        if self.receipts.get(stop.stop_id) is not None:
            self.receipts.touch(stop.stop_id)
            return
        receipt = self.receipts.open(stop)
        entry = composing.entry(stop)
        if stop.target.uids:
            for uid in stop.target.uids:
                self._stop_uid(now, uid, stop, receipt, entry, composing)
        else:
            for choice in self.requests.select(stop.target, stop):
                self._stop_choice(now, choice, stop, receipt, entry, composing)

    def _lease_lost(self, now: float, event: LeaseLost, composing: _Composing) -> None:
        for choice in self.requests.of_gateway(event.gateway):
            reason = Reason.CLIENT_DISCONNECT
            if choice.mark is None and self._mark(choice, reason, composing) is None:
                self._end(now, choice, reason, composing)

    def _stop_uid(
        self,
        now: float,
        uid: str,
        stop: Stop,
        receipt: Receipt,
        entry: StopEntry,
        composing: _Composing,
    ) -> None:
        mine = [
            choice
            for choice in self.requests.live(uid)
            if stop.admin or choice.submission.tenant == stop.tenant
        ]
        for choice in mine:
            self._stop_choice(now, choice, stop, receipt, entry, composing)
        if mine:
            return
        finished = self.requests.finished(uid)
        if finished is not None and (stop.admin or finished[1] == stop.tenant):
            receipt.matched(uid, finished[0].value)
            receipt.already += 1
            return
        receipt.unmatched(uid)
        if uid not in self.requests:
            self.requests.bury(uid, stop, now)

    def _stop_choice(
        self,
        now: float,
        choice: Choice,
        stop: Stop,
        receipt: Receipt,
        entry: StopEntry,
        composing: _Composing,
    ) -> None:
        receipt.matched(choice.uid, outcome_of(stop.reason).value)
        mark = choice.mark or self._mark(choice, stop.reason, composing)
        if mark is not None:
            mark.stops.append(stop)
            receipt.marked += 1
            return
        rid, discarded = self._end(now, choice, stop.reason, composing)
        receipt.tokens_discarded += discarded
        if rid:
            entry.rids.append(rid)

    # --- stops that take effect later -----------------------------------------------------

    def _mark(self, choice: Choice, reason: Reason, composing: _Composing) -> Mark | None:
        """Note that a request is to end when its policy says so; ``None``: at once."""
        policy, replica = self.config.policy, self.replica
        effect = effect_on(policy.effects, choice)
        if effect is Effect.AT_ONCE:
            return None
        if effect is Effect.ONE_TOKEN:
            self._grammars.leave(choice, composing.turn)
            choice.grammar = 0
            choice.tokens = choice.tokens[:1]
            choice.prompt_len = 1
            choice.move(Life.READY)
            self._schedule.queue([choice])
        seq = choice.seq
        flying = seq is not None and seq.last_step > replica.processed
        choice.mark = Mark(
            effect,
            reason,
            None if policy.delivers_marked else choice.output_len,
            replica.turn + 1,
            replica.step,
            seq.last_step if seq is not None and flying else 0,
        )
        self._marked[choice.key] = choice
        composing.marks = True
        return choice.mark

    def _unmark(self, choice: Choice, mark: Mark, composing: _Composing) -> None:
        choice.mark = None
        del self._marked[choice.key]
        for stop in mark.stops:
            self.receipts.open(stop).marked -= 1
            entry = composing.entry(stop)
            if choice.seq is not None:
                entry.rids.append(choice.rid)

    def _sweep(self, now: float, composing: _Composing) -> None:
        """End whom a stop has found and who can end now."""
        frozen = self.mode is Mode.FROZEN  # no step will come to wait for
        for choice in list(self._marked.values()):
            mark = choice.mark
            assert mark is not None
            if frozen or is_due(mark, choice, self.replica, composing.turn.number):
                _, discarded = self._end(now, choice, mark.reason, composing)
                if mark.stops:
                    self.receipts.open(mark.stops[0]).tokens_discarded += discarded

    def _close_stops(self, composing: _Composing) -> list[StopApplied]:
        applied = []
        for entry in composing.turn.stops:
            done = stop_applied(entry.stop_id, entry.traceparent, entry.rids, composing.drops)
            self.receipts.effective(composing.turn.number, done)
            applied.append(done)
        return applied

    # --- time ----------------------------------------------------------------------------

    def _expire(self, now: float, composing: _Composing) -> None:
        for key, reason in self._deadlines.due(now):
            choice = self.requests.by_key.get(key)
            # A deadline of the queue is met by having left it, if only for a while.
            if choice is None or (reason is Reason.DEADLINE_QUEUE and choice.admitted_at):
                continue
            self._end(now, choice, reason, composing)
        if self._drain_until is not None and now >= self._drain_until:
            self._end_all(now, Reason.DRAIN, composing)
        self.requests.expire(now)

    # --- admission -----------------------------------------------------------------------

    def _submissions(self, now: float, events: list[Event], composing: _Composing) -> None:
        """Queue what was submitted.

        What ends requests by a selector, or with their gateway, and came after a submission of
        the same batch covers it too.
        """
        submitted = False
        for event in events:
            if isinstance(event, Submit):
                self._submit(now, event.submission, composing)
                submitted = True
            elif submitted and isinstance(event, LeaseLost):
                self._lease_lost(now, event, composing)
            elif submitted and isinstance(event, StopSignal) and not event.stop.target.uids:
                stop = event.stop
                entry = composing.entries.get(stop.stop_id)
                if entry is not None:  # it takes effect in this turn
                    receipt = self.receipts.open(stop)
                    for choice in self.requests.select(stop.target, stop):
                        self._stop_choice(now, choice, stop, receipt, entry, composing)

    def _submit(self, now: float, submission: Submission, composing: _Composing) -> None:
        refused = self._refusal(now, submission)
        if refused is not None:
            composing.outputs.refused.append(refused)
            return
        config = self.config
        longest = length_max(submission, config.max_model_len, self.replica)
        keys = range(self._next_key, self._next_key + submission.choices)
        self._next_key += submission.choices
        choices = [Choice(key, submission, index, now, longest) for index, key in enumerate(keys)]
        params = submission.params
        enders = frozenset(params.stop_token_ids)
        if submission.grammar or not params.ignore_eos:
            enders |= config.eos_ids
        deadlines = tightest(submission.deadlines, config.deadlines)
        ready = True
        for choice in choices:
            choice.enders = enders
            self._deadlines.add(choice.key, now, deadlines)
            if submission.grammar:
                ready = self._grammars.join(choice, composing.turn)
                if ready:
                    choice.move(Life.READY)
                    choice.ready_at = now
        self.requests.add(choices)
        if ready:
            self._schedule.queue(choices)
        composing.outputs.accepted.append(Accepted(submission.uid, tuple(keys)))
        self._bury_born(now, choices, composing)

    def _bury_born(self, now: float, choices: list[Choice], composing: _Composing) -> None:
        """Stop at once what a stop that came before it has named."""
        for choice in choices:
            submission = choice.submission
            for uid in dict.fromkeys((submission.uid, choice.uid)):
                stop = self.requests.tombstone(uid, submission.tenant)
                if stop is not None:
                    receipt = self.receipts.open(stop)
                    receipt.arrived(uid)
                    self._stop_choice(now, choice, stop, receipt, composing.entry(stop), composing)
                    break

    def _refusal(self, now: float, submission: Submission) -> Refused | None:
        """Why a submission can't be queued, before anything is computed for it."""
        refused = refusal(now, submission, self.config, self.requests)
        if refused is None and (self.draining or self.mode is Mode.DRAINING):
            refused = Refused(submission.uid, 503, "drain", REFUSE_DRAIN)
        return refused or capacity_refusal(
            submission, self.replica, self.waiting, self.config.max_waiting
        )


@dataclass(slots=True)
class _Ending:
    """What a result does to a request: it ends with ``keep`` output tokens (None: all)."""

    choice: Choice
    reason: Reason
    keep: int | None
    message: str = ""


@dataclass(slots=True)
class _Composing:
    """A turn while it is being made."""

    turn: Turn
    outputs: Outputs
    drops: dict[int, tuple[Dropped, int]] = field(default_factory=dict)
    entries: dict[str, StopEntry] = field(default_factory=dict)  # those of the turn, by stop id
    marks: bool = False  # somebody is to end in a later turn, which this one must come before

    def entry(self, stop: Stop) -> StopEntry:
        """The entry of ``stop`` in this turn, made when there is none yet."""
        entry = self.entries.get(stop.stop_id)
        if entry is None:
            entry = self.entries[stop.stop_id] = StopEntry(stop.stop_id, stop.traceparent, [])
            self.turn.stops.append(entry)
        return entry
