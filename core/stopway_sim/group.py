"""One epoch of a group, without time: the real planner, real replicas, fake exec queues and memory.

Whoever drives it decides when the leader takes a turn, when a follower gets a frame and when a rank
runs its next step; the group only refuses what cannot happen, and checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stopway_core.config import PlannerConfig
from stopway_core.events import Compiled, Completed, Event
from stopway_core.ledger import OutOfResources
from stopway_core.lifecycle import State
from stopway_core.planner import Planned
from stopway_core.receipts import RankInfo, ReceiptBook
from stopway_core.replica import Applied, Replica, StopApplied
from stopway_core.topology import stage_of
from stopway_core.turn import Compile, Turn, decode_turn, encode_turn
from stopway_core.types import NO_SOURCE, RowWork, StepResult, StepWork
from stopway_core.wire import Decoder, FrameKind, encode
from stopway_sim import model
from stopway_sim.failure import require
from stopway_sim.places import ObservedPlanner
from stopway_sim.sampling import Sampler, parse

Holder = tuple[str, int]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The size of a simulated group."""

    tensor: int = 1
    pipeline: int = 1
    blocks: int = 16
    block_size: int = 4
    vocab: int = 64
    grammars: int = 4
    prefix_cache: bool = True

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


@dataclass(slots=True)
class Load:
    """An off-queue writer: the KV of a prefix comes from elsewhere, in its own time."""

    ident: int
    tokens: list[int]
    blocks: list[int]

    @property
    def holder(self) -> Holder:
        return ("host", self.ident)


@dataclass(frozen=True, slots=True)
class Hazard:
    """An off-queue use that a policy without fences allows: the block may still be written."""

    block: int
    last_step: int  # newest launched over it
    completed: int  # newest that had completed by then


class SimRank:
    """A rank: replica, memory, and the queue of launched steps that it has not run yet."""

    def __init__(self, rank: int, shape: GroupShape) -> None:
        self.rank = rank
        self.stage = stage_of(rank, shape.tensor)
        self.tensor_index = rank % shape.tensor
        self.replica = Replica(
            shape.blocks,
            shape.block_size,
            grammars=shape.grammars,
            prefix_cache=shape.prefix_cache,
        )
        self.memory = model.Memory(shape.blocks, shape.block_size, rank)
        self.queue: deque[StepWork] = deque()
        self.executed = 0
        self.decoder = Decoder()
        self.stops: dict[str, StopApplied] = {}  # by id, as last applied here
        self.loads: dict[int, Load] = {}
        self.ended: set[int] = set()  # rids that ended here; membership only
        self.compiling: deque[Compile] = deque()  # of the rank that samples
        self.refused = 0  # frames of another epoch


@dataclass(slots=True)
class Facts:
    """What the leader decided in a turn; every other rank must come to the same."""

    digest: int
    stops: list[StopApplied]
    work: list[tuple[object, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Delivered:
    """What a frame did at a follower."""

    turns: list[tuple[Turn, Applied]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class Group:
    """Leader and followers of one epoch."""

    def __init__(self, shape: GroupShape, config: PlannerConfig, epoch: int = 1) -> None:
        self.shape = shape
        self.epoch = epoch
        self.ranks = [SimRank(rank, shape) for rank in range(shape.ranks)]
        infos = [RankInfo(r.rank, r.stage, f"node-{r.rank}") for r in self.ranks]
        self.receipts = ReceiptBook("sim", epoch, infos)
        self.planner = ObservedPlanner(config, self.ranks[0].replica, self.receipts)
        self.hazards: list[Hazard] = []
        self.log: list[bytes] = []  # all frames, in order
        self.checking = True  # off while a run repeats what an earlier one checked
        self._facts: dict[int, Facts] = {}
        self._parts: dict[tuple[int, int], dict[int, list[list[int]]]] = {}
        self._hidden: dict[tuple[int, int], list[list[int]]] = {}
        self._stage_done = [0] * shape.pipeline
        self._gone: dict[tuple[int, int], set[int]] = {}  # (step, stage) -> rids that left it
        self.sampler = Sampler(shape.vocab)
        self._next_load = 1

    # --- turns ---------------------------------------------------------------------------

    def turn(self, now: float, events: list[Event]) -> tuple[Planned, bytes] | None:
        """The leader takes a turn; returns it with the frame for the followers."""
        planned = self.planner.turn(now, events)
        if planned is None:
            return None
        leader = self.ranks[0]
        frame = encode_turn(planned.turn, self.epoch)
        self.log.append(frame)
        facts = Facts(leader.replica.digest, planned.stops)
        if planned.work is not None:
            facts.work = self._capture(planned.work)
            leader.queue.append(planned.work)
        self._facts[planned.turn.number] = facts
        for stop in planned.stops:
            leader.stops[stop.stop_id] = stop
        self._apart_from_the_replica(leader, planned.turn)
        if self.checking:
            leader.replica.check()
            self.check_agreement()
        return planned, frame

    def deliver(self, rank: SimRank, data: bytes) -> Delivered:
        """Bytes of the control channel reach a follower."""
        done = Delivered()
        for frame in rank.decoder.feed(data):
            if frame.epoch != self.epoch:
                rank.refused += 1
            elif frame.kind is FrameKind.TURN:
                turn = decode_turn(frame)
                applied = rank.replica.apply(turn)
                self._compare(rank, turn, applied)
                if applied.work is not None:
                    rank.queue.append(applied.work)
                self._apart_from_the_replica(rank, turn)
                done.turns.append((turn, applied))
            else:
                load = self._load_op(rank, frame.body)
                if load is not None:
                    done.loads.append(load)
        return done

    @property
    def sampling_rank(self) -> SimRank:
        """The first of the last stage: it samples, and compiles grammars."""
        return self.ranks[len(self.ranks) - self.shape.tensor]

    def _apart_from_the_replica(self, rank: SimRank, turn: Turn) -> None:
        rank.ended.update(turn.ends)
        if rank is self.sampling_rank:
            for slot in turn.forgets:
                self.sampler.grammars.pop(slot, None)
                rank.compiling = deque(c for c in rank.compiling if c.slot != slot)
            rank.compiling.extend(turn.compiles)

    def compile_next(self) -> Compiled | None:
        """The sampling rank compiles a grammar, off-queue; what it reports."""
        if not self.sampling_rank.compiling:
            return None
        compile = self.sampling_rank.compiling.popleft()
        try:
            self.sampler.grammars[compile.slot] = parse(compile.text)
        except ValueError as error:
            return Compiled(compile.slot, str(error))
        return Compiled(compile.slot)

    def _capture(self, work: StepWork) -> list[tuple[object, ...]]:
        rows = [self._row(row) for row in work.rows]
        return [*rows, (work.copies, work.left)]

    def _row(self, row: RowWork) -> tuple[object, ...]:
        end = row.start + len(row.tokens)
        used = -(-end // self.shape.block_size)
        require(len(row.blocks) >= used, f"request {row.rid} runs beyond its blocks")
        known = row.start if row.source != NO_SOURCE else end - max(row.samples - 1, 0)
        require(
            row.history[row.start : known] == row.tokens[: known - row.start],
            f"request {row.rid} feeds other tokens",
        )
        return (
            row.rid,
            row.start,
            list(row.tokens),
            row.samples,
            row.source,
            row.grammar,
            row.blocks[:used],
        )

    def _compare(self, rank: SimRank, turn: Turn, applied: Applied) -> None:
        facts = self._facts[turn.number]
        name = f"rank {rank.rank}, turn {turn.number}"
        require(rank.replica.digest == facts.digest, f"{name}: the digests differ")
        require(applied.stops == facts.stops, f"{name}: the stops did not do the same")
        work = self._capture(applied.work) if applied.work is not None else []
        require(work == facts.work, f"{name}: the steps differ")
        for stop in applied.stops:
            rank.stops[stop.stop_id] = stop
        if self.checking:
            rank.replica.check()

    def check_agreement(self) -> None:
        """The planner's requests are the replica's, and the other way round."""
        planner, replica = self.planner, self.ranks[0].replica
        running = waiting = 0
        for choice in planner.requests.by_key.values():
            name = f"{choice.uid} ({choice.state})"
            if choice.state in (State.COMPILING, State.QUEUED):
                waiting += 1
                require(choice.seq is None, f"{name} waits and runs")
                continue
            running += 1
            require(choice.state is not State.ENDED, f"{name} ended and is kept")
            require(choice.seq is replica.seqs.get(choice.rid), f"{name} is not in the replica")
            require(
                choice.seq is not None and choice.tokens == choice.seq.tokens, f"{name} differs"
            )
        require(running == len(replica.seqs) == planner.running, "running requests differ")
        require(waiting == planner.waiting, "waiting requests differ")
        require(len(replica.in_flight) <= planner.config.window, "more steps than the window")

    # --- steps ---------------------------------------------------------------------------

    def executable(self, rank: SimRank) -> bool:
        """Whether the rank's next step can run: launched here, and done by the stage before.

        The ranks of a stage reduce with each other, so none is a whole step ahead.
        """
        if not rank.queue:
            return False
        step = rank.queue[0].step
        if self._stage_done[rank.stage] < rank.executed:
            return False
        return rank.stage == 0 or self._stage_done[rank.stage - 1] >= step

    def execute(self, rank: SimRank) -> StepResult | None:
        """Run the rank's next step: write, then read. The last rank to do it has the result."""
        require(self.executable(rank), f"rank {rank.rank} cannot run a step now")
        work = rank.queue.popleft()
        gone = self._leaving(rank, work)
        for source, target in work.copies:
            rank.memory.copy(source, target)
        hidden = self._inputs(rank, work)
        sealed = rank.replica.ledger.blocks.sealed
        size = self.shape.block_size
        for row, states in zip(work.rows, hidden, strict=True):
            if row.rid in gone:
                continue
            for position in range(row.start, row.start + len(row.tokens)):
                block = row.blocks[position // size]
                require(not sealed[block], f"step {work.step} writes sealed block {block}")
            cells = [model.cell(x, rank.stage, rank.tensor_index) for x in states]
            rank.memory.write(row.blocks, row.start, cells)
        shares = []
        for row in work.rows:
            if row.rid in gone:  # zeros, where the next stage expects something
                shares.append([0] * len(row.tokens))
                continue
            end = row.start + len(row.tokens)
            cells = rank.memory.read(row.blocks, end)
            shares.append([model.attend(cells[:at]) for at in range(row.start + 1, end + 1)])
        rank.executed = work.step
        return self._reduce(rank, work, shares)

    def _leaving(self, rank: SimRank, work: StepWork) -> set[int]:
        """Rows that leave a step since their request has ended on some rank of the stage.

        The ranks of a stage agree on it by a reduction. Half of those that could leave do.
        """
        key = work.step, rank.stage
        gone = self._gone.get(key)
        if gone is None:
            stage = [r for r in self.ranks if r.stage == rank.stage]
            gone = self._gone[key] = {
                row.rid
                for row in work.rows
                if (work.step + row.rid) % 2 and any(row.rid in r.ended for r in stage)
            }
        return gone

    def _inputs(self, rank: SimRank, work: StepWork) -> list[list[int]]:
        if rank.stage:
            return self._hidden[work.step, rank.stage - 1]
        return [
            [model.embed(token, at) for at, token in enumerate(self.sampler.fed(row), row.start)]
            for row in work.rows
        ]

    def _reduce(self, rank: SimRank, work: StepWork, shares: list[list[int]]) -> StepResult | None:
        key = work.step, rank.stage
        parts = self._parts.setdefault(key, {})
        parts[rank.tensor_index] = shares
        if len(parts) < self.shape.tensor:
            return None
        del self._parts[key]
        gone = self._gone.pop(key)
        hidden = [
            [model.reduce(states) for states in zip(*rows, strict=True)]
            for rows in zip(*parts.values(), strict=True)
        ]
        self._stage_done[rank.stage] = work.step
        self._hidden.pop((work.step, rank.stage - 1), None)
        if rank.stage + 1 < self.shape.pipeline:
            self._hidden[key] = hidden
            return None
        tokens, counts = self.sampler.sample(work, hidden, gone)
        several = any(row.samples > 1 for row in work.rows)
        return StepResult(work.step, tokens, counts=counts if several else [])

    # --- off-queue writers ---------------------------------------------------------------

    def begin_load(self, tokens: list[int], *, fenced: bool = True) -> tuple[Load, bytes] | None:
        """Take blocks for the KV of ``tokens`` (whole blocks), to be written off the exec queue.

        ``None`` when too few blocks may be taken. With ``fenced`` False it takes them as on-queue
        use may: the mistake that the fence is there to prevent. Where the policy knows no fence,
        what it would have taken too early is recorded as a ``Hazard``, and waits nevertheless.
        """
        if not self.planner.config.policy.fenced:
            self._record_hazards(len(tokens) // self.shape.block_size)
        ident = self._next_load
        body = {
            "op": "load",
            "id": ident,
            "tokens": tokens,
            "completed": self.ranks[0].replica.processed,
            "fenced": fenced,
        }
        try:
            load = self._load_op(self.ranks[0], body)
        except OutOfResources:
            return None
        self._next_load += 1
        assert load is not None
        return load, self._side_frame(body)

    def _record_hazards(self, count: int) -> None:
        replica = self.ranks[0].replica
        pool, done = replica.ledger.blocks, replica.processed
        self.hazards += [
            Hazard(block, pool.last_step[block], done)
            for block in pool.next_free(count)
            if pool.last_step[block] > done
        ]

    def write_load(self, rank: SimRank, load: Load, solo: model.Solo) -> None:
        """The load's data arrives at a rank, in whatever order to its steps."""
        solo.prefill(len(load.tokens))
        cells = solo.cells[rank.stage][rank.tensor_index]
        rank.memory.write(load.blocks, 0, cells[: len(load.tokens)])

    def end_load(self, load: Load) -> bytes:
        """Every rank has reported its part: the blocks are sealed and cached."""
        body = {"op": "done", "id": load.ident}
        self._load_op(self.ranks[0], body)
        self.ranks[0].replica.check()
        return self._side_frame(body)

    def _side_frame(self, body: dict[str, object]) -> bytes:
        frame = encode(FrameKind.POD_IN, body, epoch=self.epoch)
        self.log.append(frame)
        return frame

    def _load_op(self, rank: SimRank, body: dict[str, object]) -> Load | None:
        """The same on every rank, at the same place between the same turns."""
        replica = rank.replica
        pool = replica.ledger.blocks
        ident, size = body["id"], self.shape.block_size
        assert isinstance(ident, int)
        if body["op"] == "load":
            tokens, completed = body["tokens"], body["completed"]
            assert isinstance(tokens, list) and isinstance(completed, int)
            load = Load(ident, list(tokens), [])
            count = len(tokens) // size
            if body["fenced"]:
                load.blocks = pool.acquire_unordered(load.holder, count, completed)
            else:
                load.blocks = pool.acquire(load.holder, count)
            rank.loads[ident] = load
            return load
        load = rank.loads.pop(ident)
        entry = replica.cache.root("")
        for index, block in enumerate(load.blocks):
            pool.seal(block)
            run = tuple(load.tokens[index * size : (index + 1) * size])
            entry = replica.cache.insert(entry, run, block)
        replica.ledger.drop(load.holder)
        return None

    # --- the end -------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is asked, in flight, or not yet applied."""
        newest = self.ranks[0].replica
        return (
            not self.planner.requests.by_key
            and not newest.in_flight
            and all(r.replica.turn == newest.turn and not r.queue for r in self.ranks)
            and not any(r.loads for r in self.ranks)
            and not self.sampling_rank.compiling
        )

    def check_idle(self) -> None:
        """Everything is free: invariant 8."""
        require(self.idle, "the group is not idle")
        for rank in self.ranks:
            rank.replica.check()
            for pool in rank.replica.ledger.pools.values():
                counts = f"{pool.free} free + {pool.idle} cached of {pool.total}, {pool.held} held"
                require(pool.held == 0, f"rank {rank.rank}, {pool.kind}: {counts}")
            require(not rank.replica.seqs, f"rank {rank.rank} still runs {list(rank.replica.seqs)}")

    def drive(
        self,
        now: float,
        events: Sequence[Event] = (),
        on_turn: Callable[[Planned], None] | None = None,
    ) -> list[Planned]:
        """The undelayed group: take turns and run every step at once until nothing is left."""
        made: list[Planned] = []
        pending: list[Event] = list(events)
        while True:
            got = self.turn(now, pending)
            pending = []
            if got is not None:
                made.append(got[0])
                if on_turn is not None:
                    on_turn(got[0])
                for rank in self.ranks[1:]:
                    self.deliver(rank, got[1])
            pending = list(self.run_steps())
            if got is None and not pending:
                return made

    def run_oldest(self) -> Completed:
        """Run the oldest step in flight, and no other, on all ranks; its result."""
        step = next(iter(self.planner.replica.in_flight))
        while True:
            ready = [r for r in self.ranks if self.executable(r) and r.queue[0].step == step]
            require(bool(ready), f"step {step} cannot run")
            for rank in ready:
                result = self.execute(rank)
                if result is not None:
                    return Completed(result)

    def run_steps(self) -> list[Event]:
        """Run every step that can run now, on all ranks; returns the results as events."""
        results: list[Event] = []
        while (report := self.compile_next()) is not None:
            results.append(report)
        while True:
            ready = [rank for rank in self.ranks if self.executable(rank)]
            if not ready:
                return results
            for rank in ready:
                result = self.execute(rank)
                if result is not None:
                    results.append(Completed(result))
