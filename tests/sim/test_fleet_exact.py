"""The simulated fleet against cases that are worked out by hand, to the last microsecond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stopway_core.policies import NATIVE, POLICIES
from stopway_core.types import Deadlines, StepWork
from stopway_sim.fleet import CostModel, FleetConfig, RankLost, Report, Spec, Storm, Workload
from stopway_sim.fleet.pipeline import Chunk, Pipeline
from stopway_sim.fleet.run import simulate

# A step: 10 ms, 2 ms for each decoding row, 0.1 ms for each prefill token; context costs nothing.
COST = CostModel(
    base_s=0.010,
    decode=((1, 0.002),),
    prefill=((100, 0.010),),
    context_token_s=0.0,
    prefill_pair_s=0.0,
    turn_s=0.0,
    control_s=0.0,
    hop_s=0.0,
    gateway_s=0.001,
    redis_s=0.002,
    detokenize_s=0.0,
    intake_s=0.0,
    intake_token_s=0.0,
    transfer_s=0.005,
    window=1,
    transfer_token_s=0.0,
    blocks=64,
    max_model_len=256,
)


def run(*specs: Spec, fleet: FleetConfig | None = None, **workload: object) -> Report:
    config = fleet or FleetConfig(groups=1, cost=COST)
    work = replace(Workload(), **workload)  # type: ignore[arg-type]
    return simulate(config, work, seed=1, trace=specs)


STAYING = FleetConfig(groups=1, cost=COST, policy=replace(NATIVE, leaves_steps=False))
"""Rows stay to the end of their step, whoever has ended."""


def with_policy(name: str) -> FleetConfig:
    return FleetConfig(groups=1, cost=COST, policy=POLICIES[name])


def series(report: Report, name: str) -> Any:
    """A series that equals one within a nanosecond."""
    return pytest.approx(list(report.tally.series[name]), abs=1e-9)


def test_two_requests_take_the_steps_that_were_worked_out() -> None:
    # A is at the leader at 1 ms: prefill of 20 until 13. B is there at 6. One step decodes A and
    # prefills 50 of B, 17 ms: until 30. One decodes both, 14 ms: until 44, the end of both.
    report = run(Spec(0, 0.0, own=20, output=3), Spec(1, 0.005, own=50, output=2))
    assert series(report, "first_token") == [0.014, 0.026]
    assert series(report, "total") == [0.045, 0.040]
    assert report.makespan_s == pytest.approx(0.044)
    assert report.tally.counts["delivered"] == 5
    assert report.rate("good") == pytest.approx(5 / 0.044)


def test_a_pipeline_overlaps_steps_and_pays_its_hops() -> None:
    # Two stages of 6 ms and a hop of 1 ms; a result takes 2 ms back, a turn 2 ms out. One prompt
    # token: 10.1 ms, so 5.05 a stage: 1 + 2 + 5.05 + 1 + 5.05 + 2 = 16.1, and 1 to the client.
    cost = replace(COST, pipeline=2, window=2, control_s=0.002, hop_s=0.001)
    report = run(Spec(0, 0.0, own=1, output=1), fleet=FleetConfig(groups=1, cost=cost))
    assert series(report, "first_token") == [0.0171]


def test_chunks_and_rows_take_longer_with_what_is_before_them() -> None:
    # 50 tokens: 15 ms. 50 behind 50: 15 and 2,500 pairs of a microsecond. Then a row behind 100
    # tokens: 12 ms and 100 x 0.02.
    cost = replace(COST, max_batch_tokens=50, prefill_pair_s=1e-6, context_token_s=2e-5)
    report = run(Spec(0, 0.0, own=100, output=2), fleet=FleetConfig(groups=1, cost=cost))
    assert series(report, "first_token") == [0.001 + 0.015 + 0.0175 + 0.001]
    assert series(report, "total") == [0.001 + 0.015 + 0.0175 + 0.014 + 0.001]


def test_cached_tokens_are_context_too() -> None:
    # The second prompt begins with 96 tokens that are cached, six blocks: 4 tokens behind them.
    cost = replace(COST, prefill_pair_s=1e-5)
    shared = {"prefix": 0, "prefix_tokens": 96}
    report = run(
        Spec(0, 0.0, own=4, output=1, **shared),  # type: ignore[arg-type]
        Spec(1, 0.1, own=4, output=1, **shared),  # type: ignore[arg-type]
        fleet=FleetConfig(groups=1, cost=cost),
    )
    step_s = 0.010 + 4 * 0.0001 + 4 * 96 * 1e-5
    assert series(report, "first_token") == [0.001 + 0.020 + 0.001, 0.001 + step_s + 0.001]


def test_a_step_that_rows_leave_is_shorter_by_their_context() -> None:
    # 10 ms, a row: 2 and its context of 100 tokens: 1; 200 prompt tokens: 20 and 60,000 pairs: 60.
    # The prompt's owner ends in layer 16 of 32: the 14 after the next save 80 of 93 ms.
    pipeline = Pipeline(replace(COST, context_token_s=1e-5, prefill_pair_s=1e-6))
    run = pipeline.launch(5.0, StepWork(1, []), {1: 100}, {2: Chunk(200, 300)})
    assert run.ends == pytest.approx([5.093])
    assert pipeline.leave(5.0475, {2}) == [run]
    assert run.ends == pytest.approx([5.093 - 0.080 * 14 / 32])


def test_choices_share_a_prompt_and_are_one_request() -> None:
    # The prompt of 20 until 13 ms, at the client at 14. Three answers: two go on from 19 cached
    # tokens, which their first step ends with one token each while the first decodes: 12.2 ms.
    # So the first has its second token at 25.2, with the first tokens of the others; then two rows
    # decode, 14 ms, until 39.2.
    report = run(Spec(0, 0.0, own=20, output=2, choices=3))
    assert series(report, "first_token") == [0.014]
    assert series(report, "total") == [0.0392 + 0.001]
    assert report.tally.counts["delivered"] == 6
    assert report.tally.outcomes == {"finished": 1}
    document = report.to_json()
    assert document["choices"] == {"asked": 3, "shared_tokens": 2 * 19}
    assert "priorities" not in document


def test_a_stop_of_a_request_is_of_the_choices_that_go_on() -> None:
    # The client has the first token at 14 ms and gives up at 20: the stop is there at 22, and
    # ends three choices, of which two had no token.
    report = run(Spec(0, 0.0, own=20, output=9, choices=3, cancel_after_s=0.020), fleet=STAYING)
    assert series(report, "effective") == [0.002]
    assert report.tally.outcomes == {"stopped": 1}
    assert report.tally.counts["delivered"] == 1
    assert report.tally.counts["thrown_away"] == 3  # one each, of the step in flight


def test_a_client_of_several_choices_counts_the_tokens_of_all() -> None:
    # Four tokens are there when the second step has ended, at 25.2 ms, and at the client at 26.2.
    report = run(Spec(0, 0.0, own=20, output=9, choices=3, cancel_after_tokens=4), fleet=STAYING)
    assert report.tally.counts["delivered"] == 4
    assert report.tally.series["notify"][0] == pytest.approx(0.002)


def test_a_smaller_priority_has_its_first_token_sooner() -> None:
    # One runs at a time. A runs until 13 ms, then C, which came after B: until 25. B: until 37.
    cost = replace(COST, max_running=1)
    report = run(
        Spec(0, 0.0, own=20, output=1, priority=3),
        Spec(1, 0.001, own=20, output=1, priority=3),
        Spec(2, 0.002, own=20, output=1, priority=-3),
        fleet=FleetConfig(groups=1, cost=cost),
    )
    levels = report.to_json()["priorities"]
    assert list(levels) == ["-3", "3"]
    assert levels["-3"]["first_token_s"]["max"] == pytest.approx(0.025 - 0.002 + 0.001)
    assert levels["3"]["first_token_s"]["max"] == pytest.approx(0.037 - 0.001 + 0.001)
    assert (levels["3"]["requests"], levels["3"]["finished"], levels["3"]["preemptions"]) == (
        2,
        2,
        0,
    )


def test_a_cancel_while_a_step_is_in_flight() -> None:
    # The step that began at 13 ms is in flight until 25. The client cancels at 20, having one
    # token; Redis takes 2 ms. 21 positions are two blocks.
    report = run(Spec(0, 0.0, own=20, output=100, cancel_after_s=0.020), fleet=STAYING)
    assert series(report, "detect") == [0.0]
    assert series(report, "notify") == [0.002]
    assert series(report, "effective") == [0.002]
    assert series(report, "reclaimed") == [0.005]
    assert report.tally.block_seconds == pytest.approx(2 * 0.005)
    assert (report.tally.counts["delivered"], report.tally.counts["thrown_away"]) == (1, 1)
    assert report.tally.reasons == {"client_cancel": 1}


def test_a_client_that_waits_for_tokens_acts_when_it_has_them() -> None:
    # The second token is at the client at 26 ms; the stop at 28, in the step from 25 to 37.
    report = run(Spec(0, 0.0, own=20, output=100, cancel_after_tokens=2), fleet=STAYING)
    assert series(report, "effective") == [0.002]
    assert series(report, "reclaimed") == [0.011]
    assert report.tally.counts["delivered"] == 2


def test_a_disconnect_is_seen_as_the_policy_sees_it() -> None:
    spec = Spec(0, 0.3, own=20, output=200, cancel_after_s=0.020, disconnect=True)
    found = {
        name: run(spec, fleet=with_policy(name)) for name in ("native", "sglang", "tensorrt-llm")
    }
    assert series(found["native"], "detect") == [0.0]
    assert series(found["sglang"], "detect") == [2.0]
    assert series(found["tensorrt-llm"], "detect") == [0.98]  # a second after it came
    for name, steps in (("sglang", 166), ("tensorrt-llm", 81)):
        # What is sampled after the client has gone is thrown away.
        assert found[name].tally.counts["delivered"] == 1
        assert found[name].tally.counts["thrown_away"] >= steps


def test_a_client_that_goes_within_the_grace_of_a_short_answer_stops_nothing() -> None:
    spec = Spec(0, 0.0, own=20, output=10, cancel_after_s=0.020, disconnect=True)
    report = run(spec, fleet=with_policy("sglang"))
    assert report.tally.counts["stops_too_late"] == 1
    assert report.tally.outcomes == {"finished": 1}
    assert report.tally.counts["good"] == 0  # nobody reads it


def test_stops_overtake_the_intake_or_wait_in_it() -> None:
    # Tokenizing takes 50 ms a request; B's is under way when the stop of A arrives at 32 ms.
    cost = replace(COST, intake_s=0.05)
    specs = (Spec(0, 0.0, own=20, output=100, cancel_after_s=0.060), Spec(1, 0.055, 20, 1))
    for name, notified in (("native", 0.002), ("tensorrt-llm", 0.046)):
        fleet = FleetConfig(groups=1, cost=cost, policy=POLICIES[name])
        assert series(run(*specs, fleet=fleet), "notify") == [notified]


def test_a_stop_goes_past_redis_when_that_is_down() -> None:
    fleet = FleetConfig(groups=1, cost=COST, redis_down=((0.0, 1.0),))
    report = run(Spec(0, 0.0, own=20, output=100, cancel_after_s=0.020), fleet=fleet)
    assert series(report, "notify") == [0.201]


def test_rows_of_a_stopped_prefill_leave_between_layers() -> None:
    # 200 tokens: 30 ms from 1 to 31. The stop is there at 10 ms, in layer 9 of 32: the rows are
    # gone after layer 11, nobody is left, and 21 layers of the 30 ms are saved.
    spec = Spec(0, 0.0, own=200, output=10, cancel_after_s=0.008)
    whole = run(spec, fleet=STAYING)
    assert series(whole, "reclaimed") == [0.023]
    early = run(spec)
    assert series(early, "effective") == [0.002]
    assert series(early, "reclaimed") == [0.023 - 0.030 * 21 / 32]


def test_a_deadline_ends_a_request_by_itself() -> None:
    report = run(Spec(0, 0.0, own=20, output=100), deadlines=Deadlines(total=0.030))
    assert report.tally.reasons == {"deadline_total": 1}
    assert report.makespan_s == pytest.approx(0.031)


def test_a_storm_takes_all_that_live() -> None:
    specs = [Spec(i, 0.0, own=20, output=100) for i in range(5)] + [Spec(5, 0.3, 20, 2)]
    report = run(*specs, storms=(Storm(0.2, 1.0),))
    assert report.tally.outcomes == {"stopped": 5, "finished": 1}
    assert series(report, "effective") == [0.002] * 5


def test_a_lost_rank_fails_what_the_group_had_and_the_next_waits() -> None:
    fleet = FleetConfig(groups=1, cost=COST, faults=(RankLost(0.020, 0, down_s=1.0),))
    report = run(Spec(0, 0.0, own=20, output=100), Spec(1, 0.5, own=20, output=1), fleet=fleet)
    assert report.tally.reasons == {"rank_lost": 1, "length": 1}
    # Sent at 500, dispatched at 1020, at the leader a millisecond later, 12 ms, a millisecond.
    assert series(report, "first_token") == [0.534]


def test_a_gateway_waits_no_longer_than_it_says() -> None:
    fleet = FleetConfig(groups=1, cost=COST, faults=(RankLost(0.0, 0, down_s=60.0),))
    report = run(Spec(0, 1.0, own=20, output=1), fleet=fleet)
    assert report.tally.reasons == {"rank_lost": 1}
    assert report.makespan_s == pytest.approx(11.0)


def test_prefill_and_decode_are_joined_by_a_transfer() -> None:
    # Prefill of 32 until 14.2 ms, transfer of 5, then 33 tokens of which 32 are there: a prefill
    # step of 1 token, 10.1 ms, which samples the second.
    fleet = FleetConfig(groups=2, cost=COST, split=True)
    report = run(Spec(0, 0.0, own=32, output=2), fleet=fleet)
    assert series(report, "first_token") == [0.0152]
    assert series(report, "total") == [0.0142 + 0.005 + 0.0101 + 0.001]
    assert report.tally.counts["delivered"] == 2
    assert report.tally.counts["transfers"] == 1


def test_a_stop_of_a_transfer_waits_until_it_is_quiet() -> None:
    # In transfer from 14.2 to 19.2 ms; the stop is there at 16.
    fleet = FleetConfig(groups=2, cost=COST, split=True)
    report = run(Spec(0, 0.0, own=32, output=50, cancel_after_s=0.014), fleet=fleet)
    assert series(report, "effective") == [0.002]
    assert series(report, "reclaimed") == [0.0052]
    assert report.tally.block_seconds == pytest.approx(4 * 0.0052)  # two blocks on either side
