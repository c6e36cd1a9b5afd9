"""Writers that are not ordered behind the exec queue: with the fence they do no harm, without it
they do, and the simulation sees it."""

from collections import Counter
from dataclasses import replace

import pytest

from stopway_core.config import PlannerConfig
from stopway_core.events import StopSignal, Submit
from stopway_core.policies import POLICIES
from stopway_core.types import Reason, SamplingParams, Stop, Submission, Target
from stopway_sim import Group, GroupShape, Seeded, SimFailure, World
from stopway_sim import scenario as scenarios
from stopway_sim.group import Load
from stopway_sim.model import Solo
from stopway_sim.scenario import Scenario
from stopway_sim.truth import SoloRuns, Truth

SHAPE = GroupShape(pipeline=2, blocks=3, block_size=4, vocab=40)
PREFIX = [3, 6, 9, 12, 15, 18, 21, 24]


class Case:
    """A is stopped while its step is in flight; its blocks are all that there are."""

    def __init__(self) -> None:
        self.group = Group(SHAPE, PlannerConfig(max_model_len=12, max_batch_tokens=16))
        self.truth = Truth(self.group, SoloRuns(SHAPE), Counter())
        self.solo = Solo(PREFIX, SHAPE.tensor, SHAPE.pipeline, SHAPE.vocab)
        self.turn(self.submit("a", tuple(range(1, 11))))
        stop = Stop("s", Target(uids=("a",)), Reason.CLIENT_CANCEL, "t", False, 1.0)
        self.turn(StopSignal(stop))
        assert self.group.ranks[0].queue and self.group.ranks[0].replica.ledger.blocks.free == 3

    def submit(self, uid: str, prompt: tuple[int, ...]) -> Submit:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        submission = Submission(uid, 1, "t", prompt, params, 1.0)
        self.truth.submitted(submission)
        return Submit(submission)

    def turn(self, *events: Submit | StopSignal) -> None:
        self.truth.before_turn(events)
        got = self.group.turn(1.0, list(events))
        assert got is not None
        self.truth.after_turn(got[0], 1.0)
        self.follow(got[1])

    def follow(self, frame: bytes) -> list[Load]:
        return [x for r in self.group.ranks[1:] for x in self.group.deliver(r, frame).loads]

    def load(self, *, fenced: bool) -> tuple[Load, list[Load]] | None:
        got = self.group.begin_load(PREFIX, fenced=fenced)
        return None if got is None else (got[0], self.follow(got[1]))

    def write(self, load: Load, others: list[Load]) -> None:
        for rank, mine in zip(self.group.ranks, [load, *others], strict=True):
            self.group.write_load(rank, mine, self.solo)

    def then_b_runs_on_it(self, load: Load) -> None:
        """The load is cached; B has the same prompt and reads what was loaded."""
        self.follow(self.group.end_load(load))
        b = self.submit("b", (*PREFIX, 30))
        self.group.drive(1.0, [b], on_turn=lambda planned: self.truth.after_turn(planned, 1.0))
        assert self.group.planner.requests.finished("b") is not None
        self.truth.finish()


def test_the_fence_makes_an_off_queue_writer_wait_and_its_reader_is_undisturbed() -> None:
    case = Case()
    assert case.load(fenced=True) is None  # A's step may still write all three
    results = case.group.run_steps()
    case.turn(*results)  # type: ignore[arg-type]
    got = case.load(fenced=True)
    assert got is not None
    case.write(*got)
    case.then_b_runs_on_it(got[0])
    assert case.truth.by_key[2].delivered == Solo((*PREFIX, 30), 1, 2, 40).output(3)


def test_without_the_fence_the_damage_is_seen_in_bs_output() -> None:
    case = Case()
    got = case.load(fenced=False)
    assert got is not None
    case.write(*got)  # the data is there before A's step, which then writes over it
    results = case.group.run_steps()
    case.turn(*results)  # type: ignore[arg-type]
    with pytest.raises(SimFailure, match="its undisturbed run has"):
        case.then_b_runs_on_it(got[0])


def crowded(chooser: Seeded) -> Scenario:
    """Few blocks, many stops, slow steps, many loads: blocks change hands under steps."""
    return Scenario(
        shape=GroupShape(pipeline=2, blocks=8, block_size=4, vocab=12),
        window=2,
        batch_tokens=16,
        max_running=4,
        requests=14,
        span_us=40_000,
        step_us_max=5_000,
        link_us_max=50,
        bus_drop=0,
        bus_duplicate=0,
        bus_us_max=500,
        post_drop=0,
        stop_rate=100,
        deadline_rate=0,
        disconnects=0,
        deaths=0,
        loads=8,
        load_blocks=2,
        drain=False,
    )


def failures(*, fenced: bool, seeds: int) -> list[str]:
    found = []
    for seed in range(seeds):
        chooser = Seeded(seed)
        world = World(crowded(chooser), chooser, fenced=fenced)
        try:
            world.run()
        except SimFailure as failure:
            found.append(str(failure))
    return found


def test_crowded_worlds_hold_with_the_fence_and_are_caught_without_it() -> None:
    assert failures(fenced=True, seeds=40) == []
    caught = failures(fenced=False, seeds=40)
    assert len(caught) >= 5
    for failure in caught:
        assert "writes sealed block" in failure or "undisturbed run" in failure


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_without_fences_meet_hazards_and_those_with_never_do(policy: str) -> None:
    hazards = 0
    for seed in range(40):
        chooser = Seeded(seed)
        world = World(replace(crowded(chooser), policy=policy, deadline_rate=60), chooser)
        world.run()  # what would have been taken too early waits, so all ends well
        hazards += world.coverage["hazards"]
    assert (hazards > 0) == (not POLICIES[policy].fenced)


def test_a_drawn_world_has_room_for_its_loads_beside_any_request_or_makes_it_wait() -> None:
    kinds = set()
    for seed in range(200):
        drawn = scenarios.draw(Seeded(seed))
        assert drawn.planner_config().max_model_len <= drawn.positions
        beside = drawn.load_blocks if drawn.alone else 0
        assert drawn.positions // drawn.shape.block_size + beside == drawn.shape.blocks
        kinds.add((drawn.alone, drawn.load_blocks > 0))
    assert len(kinds) == 4
