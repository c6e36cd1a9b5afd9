"""Whole simulated fleets: every request has one outcome, and a seed has one report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines
from stopway_sim.fleet import (
    SCENARIOS,
    Cancels,
    CostModel,
    FleetConfig,
    FleetError,
    HostLoads,
    Lengths,
    RankLost,
    Report,
    Storm,
    Workload,
    simulate,
)
from stopway_sim.fleet.off_queue import OffQueue
from stopway_sim.fleet.routing import route
from stopway_sim.fleet.workload import Drawer, Spec, Texts, open_loop

BUSY = Workload(
    requests=120,
    rate=60.0,
    prompt=Lengths("lognormal", (64, 0.8)),
    output=Lengths("lognormal", (48, 0.8)),
    shared=0.4,
    prefix_tokens=64,
    follow_ups=0.3,
    cancels=Cancels(share=0.3, after_s=0.5),
    storms=(Storm(1.0, 0.5),),
    deadlines=Deadlines(queue=2.0, first_token=4.0, total=8.0),
)
SMALL = CostModel(blocks=96, max_model_len=512, max_running=16, max_batch_tokens=128)


def balanced(report: Report, requests: int) -> None:
    """Every request once; nothing alive, nothing held."""
    document = report.to_json()
    assert sum(document["outcomes"].values()) == requests
    assert sum(document["reasons"].values()) == requests
    assert document["checks"]["alive_at_end"] == document["checks"]["held_at_end"] == 0
    stops = document["stops"]
    assert stops["given_up"] == stops["issued"] + stops["too_late"]
    assert document["cancel_s"]["effective"]["n"] <= stops["issued"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_crowded_fleet_balances_under_every_policy(name: str) -> None:
    fleet = FleetConfig(
        groups=2,
        cost=SMALL,
        policy=POLICIES[name],
        checked=1,
        host_loads=HostLoads(per_s=20.0, blocks=2),
        faults=(RankLost(0.8, 1, 0.7),),
    )
    report = simulate(fleet, BUSY, seed=3)
    balanced(report, BUSY.requests)
    assert report.tally.counts["checked_turns"] > 100
    assert report.tally.counts["host_loads"] > 0
    assert report.tally.counts["given_up"] > 20


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenarios_run_and_balance(name: str) -> None:
    fleet, workload = SCENARIOS[name].plan(2, 60)
    report = simulate(replace(fleet, checked=2), workload, seed=5)
    balanced(report, 60)
    assert report.tally.outcomes["stopped"] > 0


@pytest.mark.parametrize("lost", [0, 1])
def test_a_pair_that_loses_a_rank_fails_what_it_had_and_goes_on(lost: int) -> None:
    cost = replace(SMALL, blocks=256, transfer_s=0.05)
    fleet = FleetConfig(
        groups=2, cost=cost, split=True, checked=2, faults=(RankLost(0.8, lost, 0.7),)
    )
    work = replace(BUSY, deadlines=Deadlines(), storms=())
    report = simulate(fleet, work, seed=3)
    balanced(report, BUSY.requests)
    assert 0 < report.tally.reasons["rank_lost"] < BUSY.requests
    assert report.tally.outcomes["finished"] > 0


def test_the_report_depends_on_the_seed_alone() -> None:
    fleet = FleetConfig(groups=3, cost=SMALL)
    first, again, other = (
        json.dumps(simulate(fleet, BUSY, seed).to_json()) for seed in (11, 11, 12)
    )
    assert first == again != other


def test_processes_do_not_change_the_report() -> None:
    fleet = FleetConfig(groups=3, cost=SMALL)
    seen: list[tuple[int, int]] = []
    one = simulate(fleet, BUSY, 11)
    two = simulate(fleet, BUSY, 11, processes=2, progress=lambda *at: seen.append(at))
    assert one.to_json() == two.to_json()
    assert one.cdfs() == two.cdfs()
    assert seen[-1] == (120, 120)
    assert len(seen) == 3


def test_a_closed_loop_asks_as_often_as_it_says_and_no_faster() -> None:
    work = replace(BUSY, clients=5, requests=43, think_s=0.1, storms=())
    report = simulate(FleetConfig(groups=2, cost=SMALL), work, 4)
    balanced(report, 43)
    # A client's 8 or 9 requests are one after the other.
    assert report.makespan_s > 8 * 0.1


def test_memory_pressure_preempts_and_recomputes() -> None:
    cost = replace(SMALL, blocks=40)
    work = replace(BUSY, cancels=Cancels(), storms=(), deadlines=Deadlines(), follow_ups=0.0)
    report = simulate(FleetConfig(groups=1, cost=cost, checked=1), work, 2)
    balanced(report, BUSY.requests)
    assert report.tally.counts["preemptions"] > 0
    assert report.tally.counts["recomputed"] > 0
    assert report.tally.outcomes["finished"] == BUSY.requests


PRIORITIES = replace(BUSY, priorities=((-5, 0.2), (7, 0.5)), choices=Lengths.parse("values:1,3"))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_priorities_and_choices_balance_under_every_policy(name: str) -> None:
    fleet = FleetConfig(
        groups=2, cost=SMALL, policy=POLICIES[name], checked=2, faults=(RankLost(0.8, 1, 0.7),)
    )
    report = simulate(fleet, PRIORITIES, seed=3)
    balanced(report, PRIORITIES.requests)
    assert report.tally.counts["shared_tokens"] > 0
    document = report.to_json()
    levels = document["priorities"]
    assert list(levels) == ["-5", "0", "7"]
    assert sum(level["requests"] for level in levels.values()) == PRIORITIES.requests
    assert sum(level["preemptions"] for level in levels.values()) == document["preemptions"]
    assert (
        sum(level["first_token_s"]["n"] for level in levels.values())
        == document["latency_s"]["first_token"]["n"]
    )
    assert document["choices"]["asked"] > PRIORITIES.requests


def test_smaller_priorities_wait_less_and_are_not_preempted() -> None:
    work = replace(PRIORITIES, cancels=Cancels(), storms=(), deadlines=Deadlines())
    report = simulate(FleetConfig(groups=1, cost=replace(SMALL, blocks=64)), work, 2)
    levels = report.to_json()["priorities"]
    waits = [levels[level]["first_token_s"]["p50"] for level in ("-5", "0", "7")]
    assert waits == sorted(waits)
    assert levels["7"]["preemptions"] > levels["-5"]["preemptions"]


def test_priorities_and_choices_leave_the_rest_of_a_workload_as_it_is() -> None:
    plain, other = (open_loop(Drawer(work, 1, 512)) for work in (BUSY, PRIORITIES))
    assert [replace(spec, priority=0, choices=1) for spec in other] == plain
    assert {spec.priority for spec in other} == {-5, 0, 7}
    assert {spec.choices for spec in other} == {1, 3}
    homes: dict[int, set[int]] = {}
    for spec in other:
        homes.setdefault(spec.conversation, set()).add(spec.priority)
    assert all(len(found) == 1 for found in homes.values())


def test_a_split_fleet_takes_one_choice() -> None:
    fleet = FleetConfig(groups=2, split=True)
    with pytest.raises(FleetError, match="with --split every request has 1 choice"):
        simulate(fleet, PRIORITIES, 1)
    with pytest.raises(FleetError, match="with --split every request has 1 choice"):
        simulate(fleet, BUSY, 1, trace=[Spec(0, 0.0, own=5, output=5, choices=2)])


def test_longer_contexts_take_longer() -> None:
    free = replace(SMALL, context_token_s=0.0, prefill_pair_s=0.0)
    costs = (free, replace(free, context_token_s=1e-5), replace(free, prefill_pair_s=1e-6))
    work = replace(BUSY, cancels=Cancels(), storms=(), deadlines=Deadlines())
    none, rows, pairs = (simulate(FleetConfig(groups=1, cost=cost), work, 2) for cost in costs)
    assert rows.makespan_s > none.makespan_s
    assert pairs.makespan_s > none.makespan_s


def test_follow_ups_hit_what_a_stop_left_in_the_cache() -> None:
    work = replace(BUSY, follow_ups=0.8, cancels=Cancels(share=0.6, after_tokens=10), shared=0.0)
    report = simulate(FleetConfig(groups=1, cost=replace(SMALL, blocks=2048)), work, 2)
    counts = report.tally.counts
    assert 0 < counts["cache_hits_after_stop"] < counts["cache_hits"]


def test_only_unfenced_off_queue_use_meets_hazards() -> None:
    """A block of a step in flight is free; what is fenced leaves it, what is not takes it."""
    from stopway_core.replica import Replica
    from stopway_core.turn import Admit, Launch
    from stopway_core.types import SamplingParams

    for fenced in (True, False):
        replica = Replica(12, 4)
        queue = OffQueue([replica], fenced=fenced, longest=8)
        replica.admit(Admit(1, [1, 2, 3, 4, 5], 5, SamplingParams(), ""))
        replica.launch(Launch(1, [], [1], [5]))
        replica.end(1)
        assert not queue.take(("host", 1), 11)  # the longest request must fit beside it
        assert queue.take(("host", 2), 1)  # of those that no step writes
        assert queue.hazards == 0
        replica.ledger.blocks.acquire(("host", 3), 9)  # the others of them
        assert queue.take(("host", 4), 2) is not fenced
        assert queue.hazards == (0 if fenced else 2)


def test_routing_keeps_conversations_and_spreads_the_rest() -> None:
    fleet = FleetConfig(groups=4, faults=(RankLost(5.0, 2, 1e6),))
    specs = open_loop(Drawer(BUSY, 1, 8192))
    cells = route(fleet, specs)
    assert sorted(s.number for cell in cells for s in cell) == list(range(BUSY.requests))
    homes: dict[int, set[int]] = {}
    for index, cell in enumerate(cells):
        assert cell == sorted(cell, key=lambda s: s.arrival_s)
        for spec in cell:
            homes.setdefault(spec.conversation, set()).add(index)
    assert all(len(found) == 1 for found in homes.values())
    assert any(spec.history for spec in specs)
    alike = [Spec(i, 6.0 + i * 1e-6, own=10, output=100) for i in range(30)]
    assert [len(cell) for cell in route(fleet, alike)] == [10, 10, 0, 10]


def test_a_follow_up_repeats_the_prompt_and_the_answer() -> None:
    texts = Texts(7)
    first = Spec(1, 0.0, own=5, output=4, prefix=0, prefix_tokens=3, conversation=1)
    second = replace(first, number=2, own=6, history=((1, 5, 4),))
    prompt = texts.prompt(first)
    assert len(prompt) == 8
    follow = texts.prompt(second)
    assert len(follow) == second.prompt_len == 18
    assert follow[:8] == prompt
    assert texts.prompt(replace(first, number=3))[3:] != prompt[3:]
    assert Texts(8).prompt(first) != prompt


@pytest.mark.parametrize(
    ("text", "lowest", "highest"),
    [("constant:7", 7, 7), ("uniform:3:9", 3, 9), ("values:4,8", 4, 8), ("lognormal:50:1", 1, 100)],
)
def test_lengths_are_as_they_are_written(text: str, lowest: int, highest: int) -> None:
    from random import Random

    lengths, random = Lengths.parse(text), Random(1)
    drawn = [lengths.draw(random, 100) for _ in range(500)]
    assert (min(drawn) >= lowest, max(drawn) <= highest) == (True, True)
    if text != "lognormal:50:1":
        assert (min(drawn), max(drawn)) == (lowest, highest)


@pytest.mark.parametrize(
    "text", ["", "normal:1:2", "constant:", "constant:-1", "uniform:9", "lognormal:8", "values:a"]
)
def test_lengths_that_are_none_say_how_they_are_written(text: str) -> None:
    with pytest.raises(FleetError, match="write lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognormal:0:1", "MEDIAN is 0; give 1 or more"),
        ("lognormal:8:11", "SIGMA is 11; give 0 to 10"),
        ("uniform:0:4", "LOW is 0; give 1 or more"),
        ("uniform:9:3", "LOW is more than HIGH"),
        ("constant:0.5", "N is 0.5; give 1 or more"),
        ("values:4,0,2", "a value is 0; give 1 or more"),
    ],
)
def test_lengths_say_which_of_their_values_cannot_be(text: str, message: str) -> None:
    with pytest.raises(FleetError, match=message):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "at least 1"),
        ({"groups": 3, "split": True}, "odd"),
        ({"faults": (RankLost(1.0, 9, 1.0),)}, "groups are 0 to 3"),
        ({"faults": (RankLost(float("nan"), 0, 1.0),)}, "AT is nan; give 0 to"),
        ({"faults": (RankLost(1.0, 0, 0.0),)}, "DOWN_S is 0; give more than 0"),
        ({"redis_down": ((2.0, 1.0),)}, "TO must be after FROM"),
        ({"checked": -1}, "groups to check"),
        ({"checked": 9}, "9 groups to check; give at most 4"),
        ({"host_loads": HostLoads(float("inf"))}, "0 to 10000 a second"),
        ({"host_loads": HostLoads(1.0), "cost": replace(SMALL, blocks=64)}, "at least"),
    ],
)
def test_fleets_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        FleetConfig(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 0}, "at least 1"),
        ({"rate": 0.0}, "more than 0"),
        ({"shared": 1.5}, "share of shared prefixes is 1.5"),
        ({"storms": (Storm(3.0, 2.0),)}, "a storm at 3 s"),
        ({"storms": (Storm(-5.0, 0.5),)}, "a storm comes 0 s or later"),
        ({"think_s": float("inf")}, "think 0 to"),
        ({"deadlines": Deadlines(total=float("nan"))}, "deadlines are 0 seconds or more"),
        ({"cancels": Cancels(share=0.1, after_tokens=0.0)}, "more than 0 tokens"),
        ({"requests": 1 << 25}, "at most 16777216"),
        ({"priorities": ((101, 0.5),)}, "priority 101: give a whole number from -100 to 100"),
        ({"priorities": ((1, -0.5),)}, "share of priority 1 is -0.5"),
        ({"priorities": ((1, 0.5), (1, 0.1))}, "given twice"),
        ({"priorities": ((1, 0.5), (2, 0.6))}, "more than 1 together"),
        ({"choices": Lengths("constant", (65,))}, "1 to 64 choices"),
    ],
)
def test_workloads_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        Workload(**change)  # type: ignore[arg-type]
