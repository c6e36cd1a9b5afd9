"""The next step: who is in it, who must make room for it, and who is admitted into it.

On the leader only. It changes the leader's replica as it goes, in the order in which a turn is
applied: preemptions, then admissions, then the launch.
"""

from __future__ import annotations

from collections.abc import Iterable

from stopway_core.config import PlannerConfig
from stopway_core.deadlines import DeadlineHeap
from stopway_core.drafts import Drafter
from stopway_core.lifecycle import Event as Life
from stopway_core.marks import may_launch
from stopway_core.policy import Candidate, Requeue
from stopway_core.replica import Replica
from stopway_core.requests import Choice
from stopway_core.reserve import Reserves
from stopway_core.turn import Admit, Launch, Turn
from stopway_core.types import StepWork
from stopway_core.waiting import WaitingQueue


class Schedule:
    """Who waits, who runs, and what the next step computes."""

    def __init__(self, config: PlannerConfig, replica: Replica, deadlines: DeadlineHeap) -> None:
        self.config = config
        self.replica = replica
        self.waiting = WaitingQueue()
        self.prefilling: dict[int, Choice] = {}  # by rid, in the order of admission
        self.decoding: dict[int, Choice] = {}
        self.stale: dict[int, Choice] = {}  # by rid: preempted, with samples still in flight
        self.victims: list[Choice] = []  # preempted by the last plan, to be ended by the policy
        self._siblings: dict[int, list[Choice]] = {}  # by the key of the one that goes first
        self._first: dict[int, int] = {}  # the same, from sibling to first
        self._deadlines = deadlines
        self._reserves = Reserves(config.policy, replica)
        self._next_rid = 1
        # (key, blocks to be had, blocks reserved, seats taken) with which the head did not fit.
        self._stuck: tuple[int, int, int, int] | None = None

    @property
    def running(self) -> int:
        """Sequences in the replicas."""
        return len(self.prefilling) + len(self.decoding)

    def _runners(self) -> list[Choice]:
        return [*self.decoding.values(), *self.prefilling.values()]

    # --- coming and going ----------------------------------------------------------------

    def queue(self, choices: list[Choice]) -> None:
        """Queue the choices of one request: the others follow when the first has its prompt."""
        first, *others = choices
        self.waiting.push(first)
        self._follow(first, others)

    def _follow(self, first: Choice, others: list[Choice]) -> None:
        if others:
            self._siblings[first.key] = others
            self._first.update((other.key, first.key) for other in others)

    def first_token(self, rid: int) -> Choice:
        """A prompt has been computed; siblings may share it from now on."""
        choice = self.prefilling.pop(rid)
        self.decoding[rid] = choice
        if self.config.draft_tokens and choice.drafter is None:
            choice.drafter = Drafter(choice.tokens, self.config.draft_tokens)
        for sibling in reversed(self._siblings.pop(choice.key, [])):
            del self._first[sibling.key]
            sibling.fork = rid
            self.waiting.push_front(sibling)
        return choice

    def leave(self, choice: Choice) -> None:
        """A choice ends. If others wait for its prompt, one of them goes first instead."""
        self.prefilling.pop(choice.rid, None)
        self.decoding.pop(choice.rid, None)
        self.stale.pop(choice.rid, None)
        first = self._first.pop(choice.key, None)
        if first is not None:
            self._siblings[first].remove(choice)
            if not self._siblings[first]:
                del self._siblings[first]
        siblings = self._siblings.pop(choice.key, None)
        if not siblings:
            self.waiting.remove(choice)
            return
        heir, *others = siblings
        for sibling in siblings:
            del self._first[sibling.key]
        if not self.waiting.replace(choice, heir):
            self.waiting.push_front(heir)
        self._follow(heir, others)

    # --- the step ------------------------------------------------------------------------

    def plan(self, now: float, turn: Turn, *, admits: bool, started: bool) -> StepWork | None:
        """Launch a step if there is room in the window and anything to compute.

        ``admits`` says whether the queue moves, ``started`` whether at least those move that had
        started before.
        """
        replica, config = self.replica, self.config
        self.victims = []
        if len(replica.in_flight) >= config.window:
            return None
        decode, growth = self._make_room(self._decodable(), turn)
        launch = Launch(replica.step + 1, [], [], [])
        budget = config.step_tokens - len(decode)
        # What is in flight is what the first token of anybody else has to wait for.
        chunks = min(budget, config.max_batch_tokens - replica.tokens_in_flight - len(decode))
        for choice in self._by_priority(self.prefilling.values()):
            chunks = self._chunk(choice, chunks, launch)
        while chunks > 0 and (admits or started):
            if not self._admit_head(now, growth, turn, started=not admits):
                break
            chunks = self._chunk(next(reversed(self.prefilling.values())), chunks, launch)
        # Who was admitted may have pushed others out of this very step, and they may be back.
        decode = [choice for choice in decode if choice.rid in self.decoding]
        launch.decode = [choice.rid for choice in decode]
        prefill = [i for i, rid in enumerate(launch.prefill) if rid in self.prefilling]
        launch.prefill = [launch.prefill[i] for i in prefill]
        launch.counts = [launch.counts[i] for i in prefill]
        if not launch.decode and not launch.prefill:
            if not (self.running or self.waiting or replica.in_flight):
                self._reserves.idle()
            return None
        if launch.decode and not turn.preempts:
            self._reserves.decoded()
        if config.draft_tokens:
            self._draft(decode, budget - sum(launch.counts), growth, launch)
        turn.launch = launch
        return replica.launch(launch)

    def _decodable(self) -> list[Choice]:
        """Whom the next step may advance by a token."""
        config = self.config
        overlaps = config.stages == 1
        ready = []
        for choice in self.decoding.values():
            seq = choice.seq
            assert seq is not None
            if seq.pending:
                # Its newest token is not known here. The sampler has it, if nothing else depends
                # on it: neither a draft nor, of several stages, the first.
                if not overlaps or choice.drafter is not None or seq.pending > 1:
                    continue
                if len(seq.tokens) + seq.pending >= choice.length_max:
                    continue
            if may_launch(choice):
                ready.append(choice)
        most = config.step_tokens
        if not overlaps:
            # As many microbatches as steps may be in flight, or the stages would take turns.
            most = min(most, -(-len(self.decoding) // config.window))
        return ready[:most]

    def _chunk(self, choice: Choice, room: int, launch: Launch) -> int:
        """Add as much of a prompt as there is room for; returns the room that is left."""
        seq = choice.seq
        assert seq is not None
        left = len(seq.tokens) - seq.launched
        if not left or room <= 0 or not may_launch(choice):
            return room
        launch.prefill.append(choice.rid)
        launch.counts.append(min(left, room))
        return room - launch.counts[-1]

    def _draft(self, decode: list[Choice], budget: int, growth: int, launch: Launch) -> None:
        """Guess what follows, as far as tokens and blocks are to spare."""
        replica = self.replica
        pool, size = replica.ledger.blocks, replica.block_size
        spare = pool.free + pool.idle - growth
        drafts: list[list[int]] = []
        for choice in decode:
            seq, draft = choice.seq, []
            assert seq is not None
            if choice.drafter is not None and not seq.pending and choice.mark is None:
                held = max(len(seq.blocks), replica.blocks_of(seq.launched + 1))
                room = min(
                    budget,
                    choice.length_max - len(seq.tokens) - 1,
                    (held + max(spare, 0)) * size - seq.launched - 1,
                )
                draft = choice.drafter.propose(room)
                budget -= len(draft)
                spare -= max(0, replica.blocks_of(seq.launched + 1 + len(draft)) - held)
            drafts.append(draft)
        if any(drafts):
            launch.drafts = drafts

    # --- room ----------------------------------------------------------------------------

    def _make_room(self, decode: list[Choice], turn: Turn) -> tuple[list[Choice], int]:
        """Preempt until every one of ``decode`` can have the block that its next token needs.

        Returns whom the step can advance, and how many blocks that takes. Where the blocks are
        held by others than requests (a transfer, a host copy), the youngest wait for their end.
        """
        pool = self.replica.ledger.blocks
        growth = sum(map(self._needs_block, decode))
        while growth > pool.free + pool.idle:
            victim = self._victim(growth - pool.free - pool.idle)
            if victim is None:
                break
            self._preempt(victim, turn)
            decode = [choice for choice in decode if choice.seq is not None]
            growth = sum(map(self._needs_block, decode))
        if turn.preempts:
            self._evict(turn)
        over = growth - pool.free - pool.idle
        for choice in sorted(decode, key=_rank, reverse=True) if over > 0 else ():
            if over > 0 and self._needs_block(choice):
                decode.remove(choice)
                over -= 1
                growth -= 1
        return decode, growth

    def _needs_block(self, choice: Choice) -> bool:
        seq = choice.seq
        assert seq is not None
        return seq.launched >= len(seq.blocks) * self.replica.block_size

    def _victim(self, short: int) -> Choice | None:
        """Whom to preempt: of the least important, and never all, for somebody must get on."""
        running = self._runners()
        keeps = min(map(_rank, running), default=None)
        if len(running) > 1 and not self.config.policy.spares_oldest:
            keeps = None
        useful = [
            candidate
            for choice in running
            if _rank(choice) != keeps and (candidate := self._candidate(choice)).frees
        ]
        for priority in sorted({candidate.priority for candidate in useful}, reverse=True):
            found = self.config.policy.victim(
                [candidate for candidate in useful if candidate.priority == priority], short
            )
            if found is not None:
                return self.decoding.get(found.rid) or self.prefilling[found.rid]
        return None

    def _candidate(self, choice: Choice) -> Candidate:
        seq = choice.seq
        assert seq is not None
        frees = self.replica.ledger.blocks.exclusive(seq.holder)
        shared = (len(seq.blocks) - frees) * self.replica.block_size
        return Candidate(
            rid=choice.rid,
            arrival=choice.arrival,
            output_len=choice.output_len,
            prompt_len=choice.prompt_len,
            recompute=max(0, seq.launched - shared),
            frees=frees,
            priority=choice.priority,
        )

    def _preempt(self, choice: Choice, turn: Turn) -> None:
        seq = choice.seq
        policy = self.config.policy
        assert seq is not None
        turn.preempts.append(choice.rid)
        self.replica.preempt(choice.rid)
        choice.wasted_tokens += seq.pending
        choice.cached_tokens = max(choice.cached_tokens, seq.cached_tokens)
        choice.stale_step = seq.last_step
        self.decoding.pop(choice.rid, None)
        self.prefilling.pop(choice.rid, None)
        choice.seq = None
        choice.preemptions += 1
        # A list of its own: a step in flight may still read the old one.
        choice.tokens = list(choice.tokens)
        if choice.drafter is not None:
            choice.drafter.follow(choice.tokens)
        self._stuck = None
        if policy.ends_constrained and choice.grammar:
            self.victims.append(choice)
            return
        choice.move(Life.PREEMPT)
        if seq.pending and policy.delivers_preempted:
            self.stale[choice.rid] = choice
        if policy.requeue is Requeue.FRONT:
            self.waiting.push_front(choice)
        else:
            self.waiting.push(choice)
        self._reserves.preempted(self.decoding.values())

    def _evict(self, turn: Turn) -> None:
        """Let cached blocks go, by policy, until those left could run on for some steps.

        Behind all preemptions of the turn, as followers do it.
        """
        pool = self.replica.ledger.blocks
        tokens = self.config.policy.evicts_on_preempt * len(self.decoding)
        turn.evicts = max(0, min(self.replica.blocks_of(tokens) - pool.free, pool.idle))
        self.replica.cache.evict(turn.evicts)

    # --- admission -----------------------------------------------------------------------

    def _admit_head(self, now: float, growth: int, turn: Turn, *, started: bool) -> bool:
        """Admit who is next, if there is room beside the ``growth`` blocks that decoding takes."""
        choice = self.waiting.head(started=started)
        if choice is None or not may_launch(choice):
            return False
        replica = self.replica
        pool = replica.ledger.blocks
        there = pool.free + pool.idle
        reserve = max(growth, self._reserves.blocks(self.running, self._runners))
        tried = (choice.key, there, reserve, self.running)
        if self._stuck == tried:
            return False
        short = self._shortage(choice) + reserve
        seats = self.running + 1 - self.config.max_running
        if short > 0 or seats > 0:
            if not self._yield_to(choice, short, seats, turn):
                self._stuck = tried
                return False
            # What it would have shared with those who went is cached now, and not to be had: they
            # may have freed less than it seemed. Then it is asked again in the next turn.
            if self._shortage(choice) + growth > 0:
                return False
        self._stuck = None
        self._admit(now, choice, turn)
        return True

    def _shortage(self, choice: Choice) -> int:
        """How many more blocks there would have to be to admit a choice; below zero: to spare."""
        wanted, there = self.replica.room_for(
            choice.tokens, choice.submission.salt, self._fork_of(choice)
        )
        return self._reserves.wanted(choice, wanted) - there

    def _fork_of(self, choice: Choice) -> int:
        """The sibling whose prompt a choice can take over now, or 0."""
        if choice.output_len or not self.replica.can_fork(choice.fork, choice.prompt_len):
            return 0
        return choice.fork

    def _admit(self, now: float, choice: Choice, turn: Turn) -> None:
        fork = self._fork_of(choice)
        self.waiting.remove(choice)
        self.stale.pop(choice.rid, None)
        rid = self._next_rid
        self._next_rid += 1
        admit = Admit(
            rid,
            choice.tokens,
            choice.prompt_len,
            choice.params,
            choice.submission.salt,
            choice.grammar,
            fork,
        )
        seq = self.replica.admit(admit)
        turn.admits.append(admit)
        choice.rid, choice.seq = rid, seq
        choice.move(Life.ADMIT)
        choice.admitted_at = choice.admitted_at or now
        if not choice.preemptions:
            choice.cached_tokens = seq.cached_tokens
        self._deadlines.met_queue(choice.key)
        self.prefilling[rid] = choice

    def _yield_to(self, choice: Choice, short: int, seats: int, turn: Turn) -> bool:
        """Preempt less important ones for a choice, all that it takes or nobody.

        Only before the first admission and eviction of a turn, since preemptions are applied
        before those.
        """
        if turn.admits or turn.evicts:
            return False
        less = [other for other in self._runners() if other.priority > choice.priority]
        less.sort(key=_rank, reverse=True)
        candidates = [self._candidate(other) for other in less]
        useful = [one for one in candidates if one.frees]
        if self.config.policy.victim(useful, short) is None:
            return False  # nobody is less important, or the policy never preempts
        chosen: list[Choice] = []
        for other, candidate in zip(less, candidates, strict=True):
            if short <= 0 and seats <= 0:
                break
            if candidate.frees or short <= 0:
                chosen.append(other)
                short -= candidate.frees
                seats -= 1
        if short > 0 or seats > 0:
            return False
        for other in chosen:
            self._preempt(other, turn)
        self._evict(turn)
        return True

    @staticmethod
    def _by_priority(choices: Iterable[Choice]) -> list[Choice]:
        return sorted(choices, key=lambda choice: choice.priority)  # stable


def _rank(choice: Choice) -> tuple[int, int]:
    """The order in which requests must get on: the smallest is never preempted."""
    return choice.priority, choice.arrival
