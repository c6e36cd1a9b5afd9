"""One group: the engine's planner and its leader's replica, fed as the leader's loop feeds them."""

from __future__ import annotations

import heapq
from typing import Any, Protocol

from stopway_core.config import PlannerConfig
from stopway_core.events import Completed, Ended, Event, Refused, StopSignal, Submit
from stopway_core.planner import Planned, Planner
from stopway_core.receipts import RankInfo, ReceiptBook
from stopway_core.replica import Replica
from stopway_core.turn import Admit, decode_turn, encode_turn
from stopway_core.types import StepResult, StepWork, Stop, Submission
from stopway_core.wire import Decoder
from stopway_sim.failure import require
from stopway_sim.fleet.config import FleetConfig
from stopway_sim.fleet.events import Events
from stopway_sim.fleet.off_queue import OffQueue
from stopway_sim.fleet.outside import Outside
from stopway_sim.fleet.pipeline import Chunk, Pipeline, StepRun
from stopway_sim.fleet.request import Answer, Request
from stopway_sim.fleet.tally import Tally
from stopway_sim.fleet.workload import choice_of, token_at


class Owner(Protocol):
    """Who hears what a group does."""

    def of(self, number: int) -> Request: ...
    def admitted(self, request: Request, cached_tokens: int) -> None: ...
    def preempted(self, request: Request) -> None: ...
    def ended(self, group: SimGroup, ended: Ended) -> None: ...
    def refused(self, group: SimGroup, refused: Refused) -> None: ...
    def noticed(self, number: int) -> None: ...
    def receipt(self, receipt: dict[str, Any]) -> None: ...
    def reached(self, request: Request) -> None: ...


class SimGroup:
    """Planner, replica and steps of one group, through all its epochs."""

    def __init__(
        self,
        index: int,
        config: FleetConfig,
        outside: Outside,
        events: Events,
        owner: Owner,
        tally: Tally,
    ) -> None:
        self.index = index
        self.epoch = 0
        self.down_until = 0.0
        self.tally = tally
        self._config = config
        self._cost = config.cost
        self._outside = outside
        self._events = events
        self._owner = owner
        self._checked = index < config.checked
        self._intake_free_at = 0.0
        self._begin()

    def _begin(self) -> None:
        cost = self._cost
        self.epoch += 1
        self.replica = Replica(cost.blocks, cost.block_size)
        self._follower = Replica(cost.blocks, cost.block_size) if self._checked else None
        replicas = [self.replica, self._follower] if self._follower else [self.replica]
        self.off_queue = OffQueue(replicas, fenced=self._outside.fenced, longest=cost.max_model_len)
        self.book = ReceiptBook(f"group-{self.index}", self.epoch, [RankInfo(0, 0, "sim")])
        self.planner = Planner(
            PlannerConfig(
                max_model_len=cost.max_model_len,
                max_running=cost.max_running,
                max_waiting=cost.max_waiting,
                max_batch_tokens=cost.max_batch_tokens,
                stages=cost.pipeline,
                window=cost.window,
                policy=self._config.policy,
            ),
            self.replica,
            self.book,
        )
        self._pipeline = Pipeline(cost)
        self._inbox: list[Event] = []
        self._ticking = False
        self._timer: float | None = None
        self._running: dict[int, Answer] = {}  # by rid
        self._open: set[str] = set()  # stops whose receipts may still change
        self._executed = 0
        self._executed_at = 0.0
        self._watched: list[tuple[int, int]] = []  # (step not to look before, request)

    # --- what comes from gateways --------------------------------------------------------

    def submit(self, submission: Submission, *, direct: bool = False) -> None:
        """A submission leaves its gateway now; ``direct`` is past the front's intake."""
        cost, at = self._cost, self._events.now
        if not direct:
            at = max(at + cost.gateway_s, self._intake_free_at) + cost.intake_s
            at += cost.intake_token_s * len(submission.prompt)
            self._intake_free_at = at
        self._events.at(at, self._deliver, self.epoch, Submit(submission))

    def stop(self, stop: Stop, delay_s: float) -> None:
        """A stop leaves its gateway now and is at the leader's pod ``delay_s`` later."""
        at = self._events.now + delay_s
        if not self._outside.stops_overtake:
            at = self._intake_free_at = max(at, self._intake_free_at)
        self._events.at(at, self._deliver, self.epoch, StopSignal(stop))

    def _deliver(self, epoch: int, event: Event) -> None:
        if epoch != self.epoch:
            return
        self._inbox.append(event)
        if isinstance(event, StopSignal):
            self._owner.noticed(int(event.stop.stop_id[1:]))
        self._poke()

    def _poke(self) -> None:
        """Take a turn once everything of this moment is there."""
        if self._events.quiet():
            self._tick(self.epoch)
        elif not self._ticking:
            self._ticking = True
            self._events.at(self._events.now, self._tick, self.epoch)

    # --- turns ---------------------------------------------------------------------------

    def _tick(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self._ticking = False
        now, planner = self._events.now, self.planner
        while True:
            events, self._inbox = self._inbox, []
            planned = planner.turn(now, events)
            if planned is None:
                break
            self._dispatch(now, planned)
        if self._watched:
            self._look(self.replica.processed)
        timer = planner.next_timer()
        if timer is not None and (self._timer is None or timer < self._timer):
            self._timer = timer
            self._events.at(timer, self._wake, self.epoch)

    def _wake(self, epoch: int) -> None:
        if epoch == self.epoch:
            self._timer = None
            self._poke()

    def _dispatch(self, now: float, planned: Planned) -> None:
        turn = planned.turn
        if self._follower is not None:
            self._follow(self._follower, planned)
        for rid in turn.preempts:
            self._preempted(self._running.pop(rid))
        for rid in turn.ends:
            self._running.pop(rid).leave()
        for admit in turn.admits:
            self._admit(admit)
        if self._config.policy.leaves_steps and turn.ends:
            for run in self._pipeline.leave(now, set(turn.ends)):
                self._events.at(self._pipeline.result_at(run), self._complete, self.epoch, run)
        if planned.work is not None:
            self._launch(now, planned.work, len(turn.launch.decode) if turn.launch else 0)
        for ended in planned.outputs.ended:
            self._owner.ended(self, ended)
        for refused in planned.outputs.refused:
            self._owner.refused(self, refused)
        if planned.stops:
            self._open.update(stop.stop_id for stop in planned.stops)
        if self._open:
            self._receipts(now)

    def _receipts(self, now: float) -> None:
        self.book.progress(0, self.replica.turn, now, self._executed, self._executed_at)
        for receipt in self.book.changed():
            if receipt["status"] in ("reclaimed", "already_finished"):
                self._open.discard(receipt["stop_id"])
                self._owner.receipt(receipt)

    def _follow(self, follower: Replica, planned: Planned) -> None:
        """A follower applies the turn as it comes off the wire, and must come to the same."""
        for frame in Decoder().feed(encode_turn(planned.turn, self.epoch)):
            applied = follower.apply(decode_turn(frame))
            require(follower.digest == self.replica.digest, "the replicas' digests differ")
            require(applied.stops == planned.stops, "the stops did not do the same")
            rows = [row.rid for row in applied.work.rows] if applied.work else []
            own = [row.rid for row in planned.work.rows] if planned.work else []
            require(rows == own, "the steps differ")
        self.tally.counts["checked_turns"] += 1

    def freed(self) -> None:
        """Off-queue use has let blocks go: somebody who waits may fit now."""
        self._poke()

    # --- answers in the replica ----------------------------------------------------------

    def _admit(self, admit: Admit) -> None:
        number, index = choice_of(admit.params.seed)
        request, seq = self._owner.of(number), self.replica.seqs[admit.rid]
        answer = self._running[admit.rid] = request.answers[index]
        answer.seq = seq
        if answer.computed_max:
            again = max(0, answer.computed_max - seq.cached_tokens)
            self.tally.counts["recomputed"] += again
            answer.computed_max = 0
        if admit.fork:
            self.tally.counts["shared_tokens"] += seq.cached_tokens
        self._owner.admitted(request, seq.cached_tokens)
        self._watch(request, self.replica.processed)

    def _preempted(self, answer: Answer) -> None:
        seq = answer.seq
        assert seq is not None
        answer.computed_max = seq.launched
        answer.leave()
        self._owner.preempted(answer.request)

    def _watch(self, request: Request, step: int) -> None:
        """Look again when the request can have the tokens after which its client gives up."""
        wanted = request.spec.cancel_after_tokens
        if wanted is not None and not request.acted_at:
            each = -(-(wanted - request.produced) // len(request.answers))
            due = step + max(1, each)
            heapq.heappush(self._watched, (due, request.spec.number))

    def _look(self, step: int) -> None:
        watched = self._watched
        while watched and watched[0][0] <= step:
            request = self._owner.of(heapq.heappop(watched)[1])
            wanted = request.spec.cancel_after_tokens
            if request.ended or not request.running or wanted is None:
                continue
            if request.produced >= wanted:
                self._owner.reached(request)
            else:
                self._watch(request, step)

    # --- steps ---------------------------------------------------------------------------

    def _launch(self, now: float, work: StepWork, decoding: int) -> None:
        """Start a step whose first ``decoding`` rows decode."""
        decode = {row.rid: row.start for row in work.rows[:decoding]}
        prefill: dict[int, Chunk] = {}
        for row in work.rows[decoding:]:
            chunk = prefill[row.rid] = Chunk(len(row.tokens), row.start)
            self._running[row.rid].request.prefilled += chunk.tokens
        run = self._pipeline.launch(now, work, decode, prefill)
        self._events.at(self._pipeline.result_at(run), self._complete, self.epoch, run)

    def _complete(self, epoch: int, run: StepRun) -> None:
        if epoch != self.epoch or run.done:
            return  # of an epoch that is over, or a step that rows have left: it came sooner
        self._pipeline.finish(run)
        work = run.work
        self._executed, self._executed_at = work.step, self._events.now
        tokens = [
            token_at(row.params.seed, row.start + len(row.tokens))
            for row in work.rows
            if row.samples
        ]
        self._inbox.append(Completed(StepResult(work.step, tokens)))
        if self._open:
            self._receipts(self._events.now)
        self._poke()

    # --- the end -------------------------------------------------------------------------

    def lose(self, until: float) -> None:
        """A rank is lost: the epoch ends now and the next begins at ``until``, with nothing."""
        self.tally.counts["hazards"] += self.off_queue.hazards
        self.down_until = until
        self._begin()

    def close(self) -> None:
        """Nothing happens any more: count what is held, which should be nothing."""
        self.tally.counts["hazards"] += self.off_queue.hazards
        self.tally.counts["held_at_end"] += self.replica.ledger.blocks.held
        self.tally.counts["alive_at_end"] += len(self.planner.requests.by_key)
        self.replica.check()
