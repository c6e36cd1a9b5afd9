"""The planner: the one brain of a group. It alone decides; turns tell everybody what.

``turn(now, events)`` takes what happened and returns what to do. It reads no clock and blocks on
nothing. Order inside a turn: results, stops, reports, deadlines, admissions, plan. So a request
that a result of this turn finishes is finished, and its stop is answered "already finished".

The planner changes the leader's own replica as it composes the turn; followers reach the same
state by ``Replica.apply``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from stopway_core import names
from stopway_core.deadlines import DeadlineHeap
from stopway_core.events import (
    Accepted,
    Completed,
    DrainStarted,
    Ended,
    Event,
    Hit,
    LeaseLost,
    Outputs,
    Refused,
    StopSignal,
    Submit,
)
from stopway_core.ledger import Dropped
from stopway_core.lifecycle import Event as Life
from stopway_core.policies import POLICIES
from stopway_core.policy import Candidate, Policy
from stopway_core.receipts import Receipt, ReceiptBook
from stopway_core.replica import Replica, StopApplied, stop_applied
from stopway_core.requests import Choice, RequestTable
from stopway_core.turn import Admit, Launch, StopEntry, Turn
from stopway_core.types import (
    Reason,
    StepResult,
    StepWork,
    Stop,
    Submission,
    outcome_of,
)

DIGEST_EVERY = 64  # turns between two comparisons of the replicas' digests


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Bounds of one group. Times in seconds."""

    max_model_len: int
    eos_ids: frozenset[int] = frozenset()
    max_running: int = 256
    max_waiting: int = 16_384
    max_batch_tokens: int = 512  # tokens of one step, decodes and prefill chunks together
    window: int = 1  # steps in flight
    submit_age_s: float = 30.0
    policy: Policy = field(default_factory=lambda: POLICIES["native"])


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
        self.draining = False
        self._drain_until: float | None = None
        self._waiting: OrderedDict[int, Choice] = OrderedDict()  # by key
        self._prefilling: dict[int, Choice] = {}  # by rid, in the order of admission
        self._decoding: dict[int, Choice] = {}
        self._deadlines = DeadlineHeap()
        self._next_key = 1
        self._next_rid = 1
        # (key, blocks to be had, blocks reserved) with which the head of the queue did not fit.
        self._stuck: tuple[int, int, int] | None = None

    # --- what others may look at ---------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the replicas."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

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
            if isinstance(event, StopSignal):
                self._stop(now, event.stop, composing)
            elif isinstance(event, LeaseLost):
                self._lease_lost(now, event, composing)
            elif isinstance(event, DrainStarted):
                self.draining = True
                self._drain_until = event.until
        for event in events:
            if isinstance(event, Hit):
                self._hit(now, event, composing)
        self._expire(now, composing)
        self._submissions(now, events, composing)
        work = self._plan(now, composing)
        if turn.empty and composing.outputs.empty:
            return None
        stops = self._close_stops(composing)
        self.replica.close(turn.number)
        return Planned(turn, work, stops, composing.outputs)

    # --- results -------------------------------------------------------------------------

    def _results(self, now: float, results: list[StepResult], composing: _Composing) -> None:
        """Deliver what completed steps sampled, then end whom that finishes.

        All results come before all ends, in the turn as here, so that every replica sees the same
        requests alive while it confirms the steps.
        """
        outputs = composing.outputs
        ending: dict[int, tuple[Choice, Reason, int]] = {}  # rid -> (.., .., tokens kept)
        for result in results:
            composing.turn.results.append((result.step, result.tokens))
            logprobs = result.logprobs
            for index, (seq, token) in enumerate(self.replica.results(result.step, result.tokens)):
                if not seq.live or seq.rid in ending:
                    continue  # its end counts this token as discarded
                choice = self._decoding.get(seq.rid)
                if choice is None:
                    choice = self._first_token(now, seq.rid)
                outputs.keys.append(choice.key)
                outputs.tokens.append(token)
                outputs.logprobs.append(logprobs[index] if logprobs else None)
                length = len(seq.tokens)
                produced = length - choice.prompt_len
                if token in choice.enders and produced >= choice.params.min_tokens:
                    ending[seq.rid] = (choice, Reason.EOS, produced)
                elif length >= choice.length_max:
                    ending[seq.rid] = (choice, Reason.LENGTH, produced)
        for choice, reason, keep in ending.values():
            self._end(now, choice, reason, composing, keep=keep)

    def _first_token(self, now: float, rid: int) -> Choice:
        choice = self._prefilling.pop(rid)
        choice.move(Life.TOKEN)
        self._decoding[rid] = choice
        if not choice.first_token_at:
            choice.first_token_at = now
            self._deadlines.met_first_token(choice.key)
        return choice

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
        rid = choice.rid if choice.seq is not None else 0
        discarded = choice.wasted_tokens
        if choice.seq is not None:
            discarded += choice.seq.pending
            choice.cached_tokens = max(choice.cached_tokens, choice.seq.cached_tokens)
            composing.drops[rid] = self.replica.end(rid)
            composing.turn.ends.append(rid)
            self._prefilling.pop(rid, None)
            self._decoding.pop(rid, None)
            choice.seq = None
        else:
            self._waiting.pop(choice.key, None)
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
                prompt_tokens=choice.prompt_len,
                keep=keep,
                cached_tokens=choice.cached_tokens,
                discarded_tokens=discarded,
                preemptions=choice.preemptions,
                queued_at=choice.queued_at,
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
            self._end(now, choice, Reason.CLIENT_DISCONNECT, composing)

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
        rid, discarded = self._end(now, choice, stop.reason, composing)
        receipt.tokens_discarded += discarded
        if rid:
            entry.rids.append(rid)

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
            for choice in list(self.requests.by_key.values()):
                self._end(now, choice, Reason.DRAIN, composing)
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
        length_max = self._length_max(submission)
        keys = range(self._next_key, self._next_key + submission.choices)
        self._next_key += submission.choices
        choices = [
            Choice(key, submission, index, now, length_max) for index, key in enumerate(keys)
        ]
        params = submission.params
        enders = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            enders |= self.config.eos_ids
        for choice in choices:
            choice.enders = enders
            self._waiting[choice.key] = choice
            self._deadlines.add(choice.key, now, submission.deadlines)
        self.requests.add(choices)
        composing.outputs.accepted.append(Accepted(submission.uid, tuple(keys)))
        for choice in choices:
            for uid in dict.fromkeys((submission.uid, choice.uid)):
                stop = self.requests.tombstone(uid, submission.tenant)
                if stop is not None:
                    receipt = self.receipts.open(stop)
                    receipt.arrived(uid)
                    self._stop_choice(now, choice, stop, receipt, composing.entry(stop), composing)
                    break

    def _refusal(self, now: float, submission: Submission) -> Refused | None:
        """Why a submission can't be queued, before anything is computed for it."""
        config = self.config
        uid = submission.uid
        prompt = len(submission.prompt)
        if self.draining:
            return Refused(uid, 503, "drain", "this group is draining; send the request again")
        if now - submission.minted_at > config.submit_age_s:
            return Refused(
                uid,
                503,
                "attempt_expired",
                f"this attempt was made {now - submission.minted_at:.0f} s ago; the bound is "
                f"{config.submit_age_s:.0f} s. Check the clocks, then send the request again",
            )
        if uid in self.requests or self.requests.finished(uid) is not None:
            return Refused(uid, 409, "duplicate", f"request {uid} is known here already")
        if submission.choices > 1 and any(
            names.child_uid(uid, index) in self.requests for index in range(submission.choices)
        ):
            return Refused(uid, 409, "duplicate", f"a choice of {uid} is known here already")
        if prompt < 1:
            return Refused(uid, 400, "empty_prompt", "the prompt has no tokens")
        if prompt >= config.max_model_len:
            return Refused(
                uid,
                400,
                "context_length_exceeded",
                f"the prompt has {prompt} tokens and the model's context is "
                f"{config.max_model_len}; at least one must be left for the answer",
            )
        total = self.replica.ledger.blocks.total
        needed = self.replica.blocks_of(prompt + 1)
        if needed > total:
            return Refused(
                uid,
                400,
                "kv_capacity_exceeded",
                f"the prompt needs {needed} KV blocks and this group has {total}; shorten it to "
                f"at most {total * self.replica.block_size - 1} tokens",
            )
        if len(self._waiting) + submission.choices > config.max_waiting:
            return Refused(
                uid, 429, "queue_full", f"{len(self._waiting)} requests are waiting; try later"
            )
        return None

    def _length_max(self, submission: Submission) -> int:
        """Tokens at which a choice ends: what it asked for, the context, or all the blocks."""
        capacity = self.replica.ledger.blocks.total * self.replica.block_size
        asked = len(submission.prompt) + submission.params.max_tokens
        return min(asked, self.config.max_model_len, capacity)

    # --- plan ----------------------------------------------------------------------------

    def _plan(self, now: float, composing: _Composing) -> StepWork | None:
        replica = self.replica
        if len(replica.in_flight) >= self.config.window:
            return None
        growth = self._make_room(composing)
        decode = [
            rid
            for rid, choice in self._decoding.items()
            if choice.seq is not None and not choice.seq.pending
        ]
        del decode[self.config.max_batch_tokens :]  # the others are in the next step
        budget = self.config.max_batch_tokens - len(decode)
        prefill: list[int] = []
        counts: list[int] = []
        for rid, choice in self._prefilling.items():
            seq = choice.seq
            assert seq is not None
            left = len(seq.tokens) - seq.launched
            if left and budget > 0:
                prefill.append(rid)
                counts.append(min(left, budget))
                budget -= counts[-1]
        while budget > 0 and self._waiting and self.running < self.config.max_running:
            admitted = self._admit_head(now, growth, composing)
            if admitted is None:
                break
            rid, left = admitted
            prefill.append(rid)
            counts.append(min(left, budget))
            budget -= counts[-1]
        if not decode and not prefill:
            return None
        launch = Launch(replica.step + 1, decode, prefill, counts)
        composing.turn.launch = launch
        return replica.launch(launch)

    def _admit_head(self, now: float, growth: int, composing: _Composing) -> tuple[int, int] | None:
        """Admit the head of the queue if it fits beside the ``growth`` blocks that decoding needs.

        Returns (rid, tokens to compute).
        """
        key, choice = next(iter(self._waiting.items()))
        replica = self.replica
        pool = replica.ledger.blocks
        there = pool.free + pool.idle
        # Leave those who run a block each to grow into, or they preempt whom we admit.
        reserve = max(growth, min(self.running, pool.total // 16))
        if self._stuck == (key, there, reserve):
            return None
        wanted, there_unshared = replica.room_for(choice.tokens, choice.submission.salt)
        if wanted + reserve > there_unshared:
            self._stuck = (key, there, reserve)
            return None
        self._stuck = None
        del self._waiting[key]
        rid = self._next_rid
        self._next_rid += 1
        submission = choice.submission
        admit = Admit(rid, choice.tokens, choice.prompt_len, choice.params, submission.salt)
        seq = replica.admit(admit)
        composing.turn.admits.append(admit)
        choice.rid, choice.seq = rid, seq
        choice.move(Life.ADMIT)
        choice.admitted_at = choice.admitted_at or now
        if not choice.preemptions:
            choice.cached_tokens = seq.cached_tokens
        self._deadlines.met_queue(choice.key)
        self._prefilling[rid] = choice
        return rid, len(seq.tokens) - seq.launched

    def _make_room(self, composing: _Composing) -> int:
        """Preempt until every decoding request can have the block that its next token needs.

        Returns how many need one.
        """
        replica = self.replica
        pool = replica.ledger.blocks
        size = replica.block_size
        short = 0
        for choice in self._decoding.values():
            seq = choice.seq
            assert seq is not None
            if len(seq.tokens) > len(seq.blocks) * size:
                short += 1
        growth = short
        short -= pool.free + pool.idle
        while short > 0:
            candidates = self._candidates()
            victim = self.config.policy.victim(candidates, short)
            if victim is None:
                # Nobody's going frees a block (all is shared): the youngest at least wants none
                # any more. The oldest alone always fits, since its length is bounded.
                victim = max(candidates, key=lambda c: c.arrival)
            chosen = self._decoding.get(victim.rid) or self._prefilling[victim.rid]
            seq = chosen.seq
            assert seq is not None
            needed = int(len(seq.tokens) > len(seq.blocks) * size)
            growth -= needed
            short -= needed
            before = pool.free + pool.idle
            self._preempt(chosen, composing)
            short -= pool.free + pool.idle - before
        return growth

    def _candidates(self) -> list[Candidate]:
        """Whom a policy may preempt: all but the oldest, so that somebody always gets on."""
        pool = self.replica.ledger.blocks
        size = self.replica.block_size
        running = [*self._decoding.values(), *self._prefilling.values()]
        oldest = min(choice.arrival for choice in running)
        candidates = []
        for choice in running:
            seq = choice.seq
            assert seq is not None
            if choice.arrival == oldest:
                continue
            frees = pool.exclusive(seq.holder)
            shared = (len(seq.blocks) - frees) * size
            candidates.append(
                Candidate(
                    rid=choice.rid,
                    arrival=choice.arrival,
                    output_len=choice.output_len,
                    prompt_len=choice.prompt_len,
                    recompute=max(0, seq.launched - shared),
                    frees=frees,
                )
            )
        return candidates

    def _preempt(self, choice: Choice, composing: _Composing) -> Dropped:
        seq = choice.seq
        assert seq is not None
        composing.turn.preempts.append(choice.rid)
        choice.wasted_tokens += seq.pending
        choice.cached_tokens = max(choice.cached_tokens, seq.cached_tokens)
        dropped = self.replica.preempt(choice.rid)
        self._decoding.pop(choice.rid, None)
        self._prefilling.pop(choice.rid, None)
        choice.seq = None
        choice.preemptions += 1
        choice.move(Life.PREEMPT)
        # A list of its own: a step in flight may still append to nobody's, but read the old one.
        choice.tokens = list(choice.tokens)
        self._waiting[choice.key] = choice
        self._waiting.move_to_end(choice.key, last=False)
        self._stuck = None
        return dropped


@dataclass(slots=True)
class _Composing:
    """A turn while it is being made."""

    turn: Turn
    outputs: Outputs
    drops: dict[int, tuple[Dropped, int]] = field(default_factory=dict)
    entries: dict[str, StopEntry] = field(default_factory=dict)  # those of the turn, by stop id

    def entry(self, stop: Stop) -> StopEntry:
        """The entry of ``stop`` in this turn, made when there is none yet."""
        entry = self.entries.get(stop.stop_id)
        if entry is None:
            entry = self.entries[stop.stop_id] = StopEntry(stop.stop_id, stop.traceparent, [])
            self.turn.stops.append(entry)
        return entry
