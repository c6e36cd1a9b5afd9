"""A world: one group and its epochs, two gateways, a bus, and everything that goes wrong."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace

from stopway_core.events import (
    Completed,
    DrainStarted,
    Event,
    Hit,
    Mode,
    ModeChanged,
    Outputs,
    Submit,
)
from stopway_core.names import publisher_id
from stopway_core.planner import Planned
from stopway_core.types import StepResult, Submission
from stopway_sim import scenario as scenarios
from stopway_sim.ambush import ambush
from stopway_sim.bus import Bus
from stopway_sim.choices import Chooser, Seeded
from stopway_sim.clients import Gateway
from stopway_sim.clock import Callback, Clock, Link
from stopway_sim.failure import SimFailure, require
from stopway_sim.group import Group, SimRank
from stopway_sim.scenario import MS, START_S, Scenario
from stopway_sim.truth import SoloRuns, Truth
from stopway_sim.writers import Writers


class Process:
    """The process of one rank: its links to the leader, what it runs, what it has to tell."""

    def __init__(self, world: World, rank: SimRank) -> None:
        delay = world.scenario.link_us_max
        self.rank = rank
        self.world = world
        self.skew_s = world.chooser.between(0, world.scenario.skew_us_max) / 1e6
        self.down = Link(world.clock, world.chooser, delay)
        self.up = Link(world.clock, world.chooser, delay)
        self.dead = False
        self.busy = False
        self.changed = False
        self.telling = False
        self.compiling = False
        self.applied_at = self.executed_at = self.now
        self.noticed: dict[str, tuple[int, float]] = {}
        self.told: set[str] = set()

    @property
    def now(self) -> float:
        """Unix time by this rank's clock."""
        return self.world.now + self.skew_s


@dataclass(slots=True)
class Report:
    """What a run came to; equal seeds give equal reports."""

    seed: int
    fingerprint: str
    scenario: Scenario
    turns: int
    epochs: int
    events: int
    coverage: Counter[str] = field(default_factory=Counter)


class World:
    """Runs one scenario to its end, checking all the way."""

    def __init__(self, scenario: Scenario, chooser: Chooser, *, fenced: bool = True) -> None:
        self.scenario = scenario
        self.chooser = chooser
        self.clock = Clock()
        self.coverage: Counter[str] = Counter()
        self.solos = SoloRuns(scenario.shape)
        self.bus = Bus(self)
        self.healed = False
        self.group: Group | None = None
        self.processes: list[Process] = []
        self.epochs = 0
        self.writers = Writers(self, fenced=fenced)
        self._hash = hashlib.sha256()
        self._inbox: list[Event] = []
        self._woken = False
        self._armed_us: int | None = None
        self._turns = 0
        self.ambushes = 0
        self._turns_bound: int | None = None
        self._hit: set[tuple[int, int]] = set()
        self.gateways = [Gateway(name, self) for name in ("gw0", "gw1")]
        self._start_epoch()
        self._plan()

    @property
    def now(self) -> float:
        """Simulated Unix time in seconds."""
        return START_S + self.clock.now_us / 1e6

    def faulty(self, percent: int) -> bool:
        """Whether a fault of that rate strikes; none does once the world has healed."""
        return not self.healed and self.chooser.chance(percent)

    # --- the plot ------------------------------------------------------------------------

    def _plan(self) -> None:
        """Draw everything that clients and fate will do."""
        scenario, chooser, clock = self.scenario, self.chooser, self.clock
        span = scenario.span_us
        submissions: list[Submission] = []
        for index in range(scenario.requests):
            at = chooser.between(0, span)
            gateway = chooser.pick(self.gateways)
            submission = scenarios.draw_submission(scenario, chooser, index, at, gateway.name)
            submissions.append(submission)
            twice = chooser.chance(5)
            clock.at(at, lambda g=gateway, s=submission, t=twice: g.submit(s, twice=t))  # type: ignore[misc]
            if chooser.chance(scenario.stop_rate):
                for number in range(chooser.pick((1, 1, 2))):
                    when = max(0, at + chooser.between(-5 * MS, chooser.pick((2, 20, 200)) * MS))
                    stop = scenarios.draw_stop(
                        chooser, 10 * index + number, submission, submissions, when
                    )
                    sender = chooser.pick(self.gateways)
                    stop = replace(stop, publisher=publisher_id(sender.name, "0"))
                    clock.at(when, lambda g=sender, s=stop: g.publish(s))  # type: ignore[misc]
        for _ in range(scenario.disconnects):
            clock.at(chooser.between(0, span), chooser.pick(self.gateways).disconnect)
        for _ in range(scenario.deaths):
            rank = chooser.below(scenario.shape.ranks)
            clock.at(chooser.between(0, span), lambda rank=rank: self.kill(rank))  # type: ignore[misc]
        for _ in range(scenario.pauses):
            at, mode, until = scenarios.draw_pause(chooser, span)
            clock.at(at, lambda mode=mode: self.post(ModeChanged(mode)))  # type: ignore[misc]
            clock.at(until, lambda: self.post(ModeChanged(Mode.RUNNING)))
            self.coverage[f"mode {mode}"] += 1
        for _ in range(scenario.loads):
            clock.at(chooser.between(0, span), self.writers.begin)
        end = span + 250 * MS
        if scenario.drain:
            last = START_S + (span + chooser.between(0, 30 * MS)) / 1e6
            clock.at(chooser.between(0, span), lambda: self.post(DrainStarted(last)))
        clock.at(end, self._heal)

    def _heal(self) -> None:
        """From here on nothing new goes wrong, and all must come to rest."""
        self.healed = True
        self.post(ModeChanged(Mode.RUNNING))
        work = 0
        if self.group is not None:
            for choice in self.group.planner.requests.by_key.values():
                work += len(choice.tokens) + choice.length_max
        # A token may take a turn to launch, one to complete, and be computed again.
        self._turns_bound = self._turns + 100 + 8 * work

    def run(self) -> None:
        """Run to the end. Raises ``SimFailure``, or what the core raises, when that is wrong."""
        self.clock.run()
        require(self.group is not None, "no group at the end")
        assert self.group is not None
        self.truth.finish()
        self._count(self.group)
        require(
            self._turns_bound is not None and self._turns <= self._turns_bound,
            f"{self._turns} turns; {self._turns_bound} were enough to come to rest",
        )
        for gateway in self.gateways:
            for request in gateway.requests.values():
                require(request.done, f"{request.submission.uid} has no outcome at its gateway")
            for stop in gateway.stops.values():
                require(stop.resolved, f"{stop.stop.stop_id} is left {stop.status}")

    # --- epochs --------------------------------------------------------------------------

    def _start_epoch(self) -> None:
        self.epochs += 1
        group = Group(self.scenario.shape, self.scenario.planner_config(), self.epochs)
        self.group = group
        self.processes = [Process(self, rank) for rank in group.ranks]
        self.truth = Truth(group, self.solos, self.coverage)
        self._inbox = []
        self._woken = False
        self._armed_us = None

    def kill(self, rank: int) -> None:
        if self.group is None or self.processes[rank].dead:
            return
        self.processes[rank].dead = True
        self.coverage["ranks killed"] += 1
        group = self.group
        self.clock.after(self.chooser.between(0, 20 * MS), lambda: self._end_epoch(group))

    def _end_epoch(self, group: Group) -> None:
        if self.group is not group:
            return
        for process in self.processes:
            process.dead = True
        self.group = None
        group.planner.lost()
        self._count(group)
        for gateway in self.gateways:
            gateway.epoch_ended(group.epoch)
        self.clock.after(self.chooser.between(0, 20 * MS), self._start_epoch)

    def _count(self, group: Group) -> None:
        """Add what an epoch has met to the coverage."""
        for (place, cause), times in group.planner.met.items():
            self.coverage[f"{place} x {cause}"] += times
        for (state, life), times in group.planner.taken.items():
            self.coverage[f"{state} --{life}-->"] += times
        self.coverage["hazards"] += len(group.hazards)

    # --- the leader ----------------------------------------------------------------------

    def on_submit(self, event: Submit) -> None:
        """A submission reaches the leader."""
        self.truth.submitted(event.submission)
        self.post(event)

    def post(self, event: Event) -> None:
        """Something reaches the leader; it takes a turn soon, with what else has come by then."""
        if self.group is None or self.processes[0].dead:
            return
        self._inbox.append(event)
        self.wake(self.chooser.between(0, 300))

    def wake(self, delay_us: int) -> None:
        if self._woken:
            return
        self._woken = True
        group = self.group

        def lead() -> None:
            if self.group is group and not self.processes[0].dead:
                self._woken = False
                self._lead()

        self.clock.after(delay_us, lead)

    def _lead(self) -> None:
        group = self.group
        assert group is not None
        events, self._inbox = self._inbox, []
        while True:
            self.truth.before_turn(events)
            got = group.turn(self.processes[0].now, events)
            events = []
            if got is None:
                break
            self._turns += 1
            self._after_turn(group, *got)
        self._publish(group)  # a stop that came again changes no replica, but wants its receipt
        self._arm(group)

    def _after_turn(self, group: Group, planned: Planned, frame: bytes) -> None:
        self._hash.update(frame)
        self.truth.after_turn(planned, self.processes[0].now)
        for process in self.processes[1:]:
            process.down.send(lambda p=process: self.arrive(group, p, frame))  # type: ignore[misc]
        leader = self.processes[0]
        leader.applied_at = leader.now
        self._leader_progress(group)
        outputs = planned.outputs
        if not outputs.empty:
            self._hash.update(repr(outputs.ended).encode())
            for gateway in self.gateways:
                gateway.outputs(group.epoch, outputs)
            self._front(group, outputs)
        if self.faulty(self.scenario.ambush):
            ambush(self, group)
        self._poke(group)

    def _arm(self, group: Group) -> None:
        timer = group.planner.next_timer()
        if timer is None:
            return
        at_us = int((timer - START_S - self.processes[0].skew_s) * 1e6) + 1
        if self._armed_us is not None and self.clock.now_us < self._armed_us <= at_us:
            return
        self._armed_us = at_us

        def ring() -> None:
            if self.group is group:
                self.wake(0)

        self.clock.at(at_us, ring)

    def _front(self, group: Group, outputs: Outputs) -> None:
        """The front looks for a stop string: here, one token that a third of requests have."""
        for key in dict.fromkeys(outputs.keys):
            watched = self.truth.by_key[key]
            needle = watched.submission.prompt[0]
            if len(watched.submission.prompt) % 3 or (group.epoch, key) in self._hit:
                continue
            if needle in watched.delivered:
                self._hit.add((group.epoch, key))
                hit = Hit(key, watched.delivered.index(needle))
                self.clock.after(
                    self.chooser.between(0, 2 * MS),
                    lambda h=hit: self.post(h) if self.group is group else None,  # type: ignore[misc]
                )

    # --- ranks ---------------------------------------------------------------------------

    def arrive(self, group: Group, process: Process, frame: bytes) -> None:
        """A frame reaches a follower in two pieces; an ended epoch's reaches its successor."""
        if self.group is None:
            return
        if self.group is not group:
            process, group = self.processes[process.rank.rank], self.group
            self.coverage["frames of another epoch refused"] += 1
        if process.dead:
            return
        cut = self.chooser.between(0, len(frame))
        for piece in (frame[:cut], frame[cut:]):
            done = group.deliver(process.rank, piece)
            for load in done.loads:
                self.writers.write(group, process, load)
            if done.turns:
                process.applied_at = process.now
                process.changed = True
                self.progress(process)
        self._poke(group)

    def _poke(self, group: Group) -> None:
        """Start every step, and every compilation, that can start."""
        self._compile(group)
        for process in self.processes:
            if not process.busy and not process.dead and group.executable(process.rank):
                process.busy = True
                delay = self.chooser.between(1, self.scenario.step_us_max)
                self.clock.after(delay, lambda p=process: self._execute(group, p))  # type: ignore[misc]

    def _compile(self, group: Group) -> None:
        rank = group.sampling_rank
        process = self.processes[rank.rank]
        if process.compiling or process.dead or not rank.compiling:
            return
        process.compiling = True

        def done() -> None:
            process.compiling = False
            if process.dead or self.group is not group:
                return
            report = group.compile_next()
            assert report is not None
            self.to_leader(process, lambda: self.post(report))
            self._compile(group)

        self.clock.after(self.chooser.between(0, self.scenario.compile_us_max), done)

    def _execute(self, group: Group, process: Process) -> None:
        process.busy = False
        if process.dead or self.group is not group:
            return
        result = group.execute(process.rank)
        process.executed_at = process.now
        process.changed = True
        if process.rank.rank:
            self.progress(process)
        else:
            self._leader_progress(group)
        if result is not None:
            self._send_result(result)
        self._poke(group)

    def _send_result(self, result: StepResult) -> None:
        """The first rank of the last stage has the tokens, whichever finished the reduction."""
        shape = self.scenario.shape
        sender = self.processes[shape.ranks - shape.tensor]
        self.to_leader(sender, lambda: self.post(Completed(result)))

    def to_leader(self, process: Process, call: Callback) -> None:
        """Send something up a follower's link; what an ended epoch sent is refused."""
        group = self.group

        def arrive() -> None:
            if self.group is group and not self.processes[0].dead:
                call()

        process.up.send(arrive)

    def progress(self, process: Process) -> None:
        """Tell the leader soon how far a follower is: one message for all until then."""
        if process.telling or not process.changed:
            return
        process.telling = True
        self.clock.after(self.chooser.between(0, 500), lambda: self._tell(process))

    def _tell(self, process: Process) -> None:
        process.telling = process.changed = False
        group = self.group
        if process.dead or group is None:
            return
        rank = process.rank
        applied, executed = rank.replica.turn, rank.executed
        times = process.applied_at, process.executed_at
        news = [(i, *n) for i, n in process.noticed.items() if i not in process.told]
        process.told.update(process.noticed)

        def arrive() -> None:
            for stop_id, turn, at in news:
                group.receipts.noticed(rank.rank, stop_id, turn, at)
            group.receipts.progress(rank.rank, applied, times[0], executed, times[1])
            self._publish(group)

        self.to_leader(process, arrive)

    def _leader_progress(self, group: Group) -> None:
        leader = self.processes[0]
        group.receipts.progress(
            0, leader.rank.replica.turn, leader.applied_at, leader.rank.executed, leader.executed_at
        )
        self._publish(group)

    def _publish(self, group: Group) -> None:
        for receipt in group.receipts.changed():
            self._hash.update(json.dumps(receipt).encode())
            self.truth.receipt(receipt)
            for gateway in self.gateways:
                gateway.receipt(group.epoch, receipt)
        if group.planner.drained:
            self.truth.drained()

    def report(self, seed: int) -> Report:
        """What the run came to."""
        self._hash.update(repr(sorted(self.coverage.items())).encode())
        return Report(
            seed,
            self._hash.hexdigest()[:16],
            self.scenario,
            self._turns,
            self.epochs,
            self.clock.events,
            self.coverage,
        )


def run_seed(seed: int, *, fenced: bool = True) -> Report:
    """Run the world of ``seed``. Raises ``SimFailure`` with a command that replays it."""
    chooser = Seeded(seed)
    scenario = scenarios.draw(chooser)
    world = World(scenario, chooser, fenced=fenced)
    try:
        world.run()
    except Exception as error:
        raise SimFailure(
            f"seed {seed} failed at {world.clock.now_us} us, turn {world._turns}: "
            f"{type(error).__name__}: {error}\n{scenario}\n"
            f"replay it with: make sim SEED={seed}"
        ) from error
    return world.report(seed)
