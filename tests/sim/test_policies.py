"""Six ways to stop: this sequence of events under this policy gives this order of what follows.

What a policy says of stops by place is measured in docs/stops.md; here are the orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from stopway_core.events import LeaseLost
from stopway_core.policies import POLICIES
from stopway_core.policy import detection_delay_s
from stopway_core.reserve import RATIO_LEAST
from stopway_core.types import Target
from stopway_sim.places import Place

if TYPE_CHECKING:
    from .conftest import Stack

    Stacks = Callable[..., Stack]

A = tuple(range(1, 12))
B = tuple(range(20, 31))
FOUR = (5, 6, 7, 8)


def decoding(s: Stack, uid: str) -> None:
    while s.place(uid) is not Place.DECODING:
        s.advance()


def preempted(s: Stack, *, blocks: int = 1, grammar: str = "") -> None:
    """A is preempted: B is older and needs a block, and a transfer has what was left."""
    s.turn(s.submit("b", (9, 2, 3, 4), 3), s.submit("a", FOUR, 3, grammar=grammar))
    s.settle()
    while s.group.planner.running < 2:
        s.turn(*s.steps())
    fill(s, blocks)
    while not (planned := s.turn(*s.steps())).turn.preempts:
        pass
    s.preempting = planned


def fill(s: Stack, blocks: int) -> None:
    """A transfer takes so many blocks."""
    got = s.group.begin_load([1, 1, 1, 1] * blocks)
    assert got is not None
    s.load = got[0]


# --- vllm ----------------------------------------------------------------------------------


def test_vllm_says_the_end_before_the_blocks_are_back(stack: Stacks) -> None:
    s = stack(policy="vllm")
    s.turn(s.submit("a", A))
    planned = s.turn(s.stop("s", "a"))
    assert [e.uid for e in planned.outputs.ended] == ["a"]
    receipt = s.group.receipts.get("s")
    assert receipt.status == "noticed" and s.group.receipts.pending_on(receipt)
    s.finish()
    assert receipt.status == "reclaimed"


def test_vllm_puts_an_abort_in_two_queues_and_applies_it_once(stack: Stacks) -> None:
    s = stack(policy="vllm")
    s.turn(s.submit("a", A))
    planned = s.turn(s.stop("s", "a"), s.submit("b", B), s.stop("s", "a"))
    assert [stop.rids for stop in planned.turn.stops] == [[1]]
    assert s.group.receipts.get("s").count == 1
    s.finish()


def test_vllm_delivers_what_was_in_flight_at_a_preemption_and_counts_it_once(
    stack: Stacks,
) -> None:
    s = stack(policy="vllm", blocks=3, window=2)
    s.turn(s.submit("b", (9, 2, 3, 4), 3))
    s.turn(s.submit("a", (*FOUR, 9), 3))
    assert s.turn(s.group.run_oldest()).turn.preempts == [2]
    assert s.place("a") is Place.STALE
    before = s.group.planner.requests.live("a")[0]
    assert before.output_len == 0  # frozen until the token comes
    planned = s.turn(*s.steps())
    assert 2 in planned.outputs.keys and before.output_len == 1
    s.finish()
    ended = s.of("a").ended
    assert (ended.keep, ended.discarded_tokens, ended.preemptions) == (3, 0, 1)


def test_vllm_preempts_the_tail_which_comes_back_first(stack: Stacks) -> None:
    s = stack(policy="vllm", blocks=4, pipeline=1)
    s.turn(*[s.submit(uid, (n, 2, 3, 4), 5) for n, uid in enumerate("abc", 1)])
    planned = s.turn(s.submit("d", B), *s.steps())
    assert planned.turn.preempts == [3]
    head = s.group.planner.schedule.waiting.head()
    assert head is not None and head.uid == "c"
    s.finish()


# --- sglang --------------------------------------------------------------------------------


def test_sglang_pops_who_waits_at_once(stack: Stacks) -> None:
    s = stack(policy="sglang", max_running=1)
    s.turn(s.submit("a", A), s.submit("b", B))
    assert [e.uid for e in s.turn(s.stop("s", "b")).outputs.ended] == ["b"]
    s.finish()


def test_sglang_makes_a_prefill_of_one_token_of_who_waits_for_a_grammar(stack: Stacks) -> None:
    s = stack(policy="sglang")
    s.turn(s.submit("a", A, grammar="3"), s.submit("b", B, grammar="3"))
    planned = s.turn(s.stop("s", "a"))
    (row,) = planned.work.rows
    assert (len(row.tokens), row.grammar, planned.outputs.ended) == (1, 0, [])
    planned = s.turn(s.group.run_oldest())
    (ended,) = planned.outputs.ended
    assert (ended.uid, ended.keep, ended.discarded_tokens) == ("a", 0, 1)
    assert ended.prompt_tokens == len(A) and not planned.outputs.tokens
    s.turn(s.group.compile_next())  # the other still gets its grammar
    s.finish()
    assert s.of("b").delivered == s.solo(B, 4, "3")


def test_sglang_ends_a_chunked_prefill_with_its_chunk(stack: Stacks) -> None:
    s = stack(policy="sglang", max_batch_tokens=8)
    s.turn(s.submit("a", A))
    assert not s.turn(s.stop("s", "a")).outputs.ended
    planned = s.turn(*s.steps())
    assert [e.uid for e in planned.outputs.ended] == ["a"] and planned.turn.launch is None
    s.finish()


def test_sglang_runs_one_more_decode_step_and_delivers_nothing_of_it(stack: Stacks) -> None:
    s = stack(policy="sglang")
    s.turn(s.submit("a", A, 9))
    planned = s.turn(*s.steps(), s.stop("s", "a"))  # no step with it is in flight
    assert planned.turn.launch.decode == [1] and not planned.outputs.ended
    had = s.of("a").delivered[:]
    planned = s.turn(*s.steps())
    assert [(e.keep, e.discarded_tokens) for e in planned.outputs.ended] == [(len(had), 1)]
    assert s.of("a").delivered == had
    assert s.group.receipts.get("s").tokens_discarded == 1
    s.finish()


def test_sglang_runs_one_more_step_also_when_one_in_flight_will_end_it(stack: Stacks) -> None:
    s = stack(policy="sglang", pipeline=1, window=2)
    s.turn(s.submit("a", A, 9))
    s.advance()
    assert s.place("a") is Place.OVERLAPPED
    had = s.of("a").delivered[:]
    s.turn(s.stop("s", "a"))
    planned = s.turn(s.group.run_oldest())
    assert planned.turn.launch.decode == [1] and not planned.outputs.ended
    planned = s.turn(s.group.run_oldest())  # what ends it; the one more is still in flight
    assert [(e.uid, e.keep) for e in planned.outputs.ended] == [("a", len(had))]
    assert planned.turn.launch is None and planned.outputs.ended[0].discarded_tokens == 3
    assert s.of("a").delivered == had
    s.finish()


@pytest.mark.parametrize(
    ("stream", "waited_s", "delay_s"), [(True, 1.5, 2.0), (False, 1.5, 2.5), (False, 9.0, 3.0)]
)
def test_sglang_aborts_two_seconds_after_a_stream_and_asks_the_others_every_four(
    stream: bool, waited_s: float, delay_s: float
) -> None:
    detection = POLICIES["sglang"].detection
    assert detection_delay_s(detection, stream=stream, waited_s=waited_s) == delay_s


def test_sglang_retracts_to_the_tail_and_makes_room_in_the_cache(stack: Stacks) -> None:
    s = stack(policy="sglang", blocks=5, pipeline=1)
    s.turn(s.submit("old", (40, 41, 42, 43, 44), 1))
    s.turn(*s.steps())
    before = s.group.planner.schedule._reserves._ratio
    preempted(s, blocks=2)
    assert s.preempting.turn.evicts > 0  # the cache of the one that had ended
    s.turn(s.submit("c", (50, 51), 1))
    waiting = s.group.planner.schedule.waiting
    assert s.place("a") is Place.PREEMPTED and waiting.head().uid == "a"
    assert s.group.planner.schedule._reserves._ratio != before
    s.turn(s.stop("s", "b"))
    planned = s.turn(*s.steps())
    assert [e.uid for e in planned.outputs.ended] == ["b"]
    assert planned.turn.evicts == 0  # an abort lets nothing go
    s.follow(s.group.end_load(s.load))
    s.finish()
    assert s.of("a").delivered == s.solo(FOUR, 3)


def test_sglang_puts_who_is_retracted_behind_those_who_wait(stack: Stacks) -> None:
    s = stack(policy="sglang", blocks=4, pipeline=1, max_running=2)
    s.turn(s.submit("b", (9, 2, 3, 4), 3), s.submit("a", FOUR, 3), s.submit("c", B[:9], 1))
    assert s.group.begin_load([1, 1, 1, 1]) is not None
    assert s.turn(*s.steps()).turn.preempts == [2]
    waiting = s.group.planner.schedule.waiting
    assert len(waiting) == 2 and waiting.head().uid == "c"


def test_sglang_retracts_who_has_least_even_the_oldest(stack: Stacks) -> None:
    s = stack(policy="sglang", blocks=10, pipeline=1)
    s.turn(s.submit("old", FOUR, 9, grammar="3"), s.submit("b", (9, 2, 3, 4), 9))
    s.turn(*s.steps())
    s.turn(s.group.compile_next(), *s.steps())
    assert s.group.planner.running == 2
    fill(s, s.counts[0])
    while not (planned := s.turn(*s.steps())).turn.preempts:
        pass
    assert s.place("old") is Place.PREEMPTED and planned.turn.launch.decode == [1]
    s.follow(s.group.end_load(s.load))
    s.finish()


def test_sglang_retracts_of_equals_who_started_last(stack: Stacks) -> None:
    s = stack(policy="sglang", blocks=6, pipeline=1)
    s.turn(*[s.submit(uid, (n, 2, 3, 4), 3) for n, uid in enumerate("abc", 1)])
    fill(s, 3)
    assert s.turn(*s.steps()).turn.preempts == [3, 2]  # one is kept
    s.follow(s.group.end_load(s.load))
    s.finish()


def test_sglang_admits_whom_the_whole_answer_fits_beside_a_share_of_the_others(
    stack: Stacks,
) -> None:
    s = stack(policy="sglang", blocks=9, pipeline=1)
    s.turn(s.submit("a", (1, 2, 3, 4), 20), s.submit("b", (5, 6, 7, 8), 12))
    assert s.group.planner.running == 1  # of a, admitted in this plan, all 20 are kept
    s.turn(*s.steps())
    assert s.group.planner.running == 2  # 0.7 of the 19 that are left are 4 blocks, and b's 4
    s.finish()


def test_sglang_lowers_its_ratio_with_each_decode_step_and_starts_anew_when_idle(
    stack: Stacks,
) -> None:
    s = stack(policy="sglang", pipeline=1)
    reserves = s.group.planner.schedule._reserves
    s.turn(s.submit("a", A, 9))
    assert reserves._ratio == 0.7  # a step that only prefills
    for steps in (1, 2):
        s.turn(*s.steps())
        assert reserves._ratio == pytest.approx(0.7 - steps * (0.7 - 0.098) / 600)
    s.finish()
    assert reserves._ratio == 0.7


def test_sglangs_ratio_is_its_least_when_nobody_is_left_to_learn_from(stack: Stacks) -> None:
    s = stack(policy="sglang", blocks=9, pipeline=1)
    s.turn(s.submit("a", FOUR, 5, priority=1))
    s.turn(*s.steps())
    s.turn(s.submit("b", tuple(range(20, 50)), 1))
    assert s.turn(*s.steps()).turn.preempts == [1]
    assert s.group.planner.schedule._reserves._ratio == RATIO_LEAST
    s.finish()


# --- llama.cpp -----------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "seen"), [("llamacpp", ["unknown", "stopped"]),
                                              ("tensorrt-llm", ["stopped"])])  # fmt: skip
def test_a_cancel_goes_to_the_front_or_behind_the_requests_that_came_before_it(
    stack: Stacks, policy: str, seen: list[str]
) -> None:
    s = stack(policy=policy)
    planned = s.turn(s.submit("a", A), s.stop("s", "a"))
    assert [e.uid for e in planned.outputs.ended] == ["a"]
    assert list(s.group.receipts.get("s").outcomes) == seen  # at the front it came too early
    s.finish()


def test_llamacpp_cleans_deferred_siblings_at_once_and_a_slot_after_its_decode_call(
    stack: Stacks,
) -> None:
    s = stack(policy="llamacpp", max_running=1)
    s.turn(s.submit("p", A, choices=3))
    planned = s.turn(s.stop("s", "p"))
    assert [e.index for e in planned.outputs.ended] == [1, 2]  # nobody rises again
    planned = s.turn(*s.steps())
    assert [(e.index, e.keep) for e in planned.outputs.ended] == [(0, 0)]
    assert planned.outputs.tokens == [] and planned.turn.launch is None
    s.finish()


def test_llamacpp_keeps_the_prompt_of_a_released_slot(stack: Stacks) -> None:
    s = stack(policy="llamacpp", pipeline=1)
    s.turn(s.submit("a", A, 9))
    s.turn(*s.steps())
    assert not s.turn(s.stop("s", "a")).outputs.ended  # its decode call runs
    planned = s.turn(*s.steps())
    assert [(e.keep, e.discarded_tokens) for e in planned.outputs.ended] == [(1, 1)]
    s.turn(s.submit("again", A, 1))
    s.finish()
    assert s.of("again").ended.cached_tokens == 8


@pytest.mark.parametrize(("stream", "delay_s"), [(True, 0.0), (False, 0.75)])
def test_llamacpp_asks_with_each_result_and_once_a_second_without(
    stream: bool, delay_s: float
) -> None:
    detection = POLICIES["llamacpp"].detection
    assert detection_delay_s(detection, stream=stream, waited_s=1.25) == delay_s


def test_llamacpp_never_preempts_and_new_work_waits(stack: Stacks) -> None:
    s = stack(policy="llamacpp", blocks=5, pipeline=1)
    s.turn(*[s.submit(f"r{i}", (i, 2, 3, 4), 6, priority=3 - i) for i in range(4)])
    assert s.group.planner.running == 1  # three blocks each in the end
    made = s.finish()
    assert sum(len(p.turn.preempts) for p in made) == 0
    ends = [e.uid for p in made for e in p.outputs.ended]
    assert ends == ["r3", "r2", "r1", "r0"]


# --- tensorrt-llm --------------------------------------------------------------------------


def test_tensorrt_llm_takes_a_cancel_behind_the_requests_before_it_only(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm")
    stop = s.stop("s", target=Target(everything=True))
    s.turn(s.submit("a", A), stop, s.submit("b", B))
    s.finish()
    assert s.ended("a") == ("client_cancel", 0) and s.ended("b") == ("length", 4)


def test_tensorrt_llm_delivers_what_was_in_flight_and_drops_one_more_step(
    stack: Stacks,
) -> None:
    s = stack(policy="tensorrt-llm", pipeline=1, window=2)
    s.turn(s.submit("a", A, 9))
    s.advance()
    assert s.place("a") is Place.OVERLAPPED
    assert not s.turn(s.stop("s", "a")).outputs.ended
    planned = s.turn(s.group.run_oldest())
    assert not planned.outputs.ended and planned.turn.launch.decode == [1]
    planned = s.turn(s.group.run_oldest())
    assert [(e.uid, e.keep, e.discarded_tokens) for e in planned.outputs.ended] == [("a", 3, 1)]
    assert s.of("a").delivered == s.solo(A, 3) and planned.turn.launch is None
    s.finish()


def test_tensorrt_llm_delivers_one_more_step_when_none_is_in_flight(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm", pipeline=1)
    s.turn(s.submit("a", A, 9))
    planned = s.turn(*s.steps(), s.stop("s", "a"))
    assert planned.turn.launch.decode == [1] and not planned.outputs.ended
    planned = s.turn(*s.steps())
    assert [(e.keep, e.discarded_tokens) for e in planned.outputs.ended] == [(2, 0)]
    assert s.of("a").delivered == s.solo(A, 2)
    s.finish()


def test_tensorrt_llm_lets_a_cancel_outlive_the_end_of_a_preemption(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm", blocks=3, window=2)
    s.turn(s.submit("b", (9, 2, 3, 4), 3))
    s.turn(s.submit("a", (*FOUR, 9), 3))
    assert s.turn(s.group.run_oldest()).turn.preempts == [2]
    planned = s.turn(s.stop("s", "a"))
    assert not planned.outputs.ended  # its pages are still being written
    planned = s.turn(s.group.run_oldest())
    ended = planned.outputs.ended
    assert [(e.uid, e.keep, e.discarded_tokens) for e in ended] == [("a", 1, 0)]
    assert not planned.turn.admits and s.of("a").delivered == s.solo((*FOUR, 9), 1)
    s.finish()


def test_tensorrt_llm_keeps_the_token_that_is_in_flight_at_a_pause(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm", blocks=3, window=2)
    s.turn(s.submit("b", (9, 2, 3, 4), 3))
    s.turn(s.submit("a", (*FOUR, 9), 3))
    assert s.turn(s.group.run_oldest()).turn.preempts == [2]
    assert 2 in s.turn(*s.steps()).outputs.keys
    s.finish()
    ended = s.of("a").ended
    assert (ended.keep, ended.discarded_tokens, ended.preemptions) == (3, 0, 1)


def test_tensorrt_llm_resumes_the_oldest_of_those_it_has_paused(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm", blocks=3, pipeline=1)
    s.turn(*[s.submit(uid, (n, 2, 3, 4), 5) for n, uid in enumerate("abc", 1)])
    planned = s.turn(*s.steps(), s.submit("d", B[:4], 1))
    assert planned.turn.preempts == [3, 2]
    admitted = [a.tokens[0] for p in s.finish() for a in p.turn.admits]
    assert list(dict.fromkeys(admitted)) == [2, 3, B[0]]


def test_tensorrt_llm_reserves_nothing_for_those_who_run(stack: Stacks) -> None:
    for policy, admits in (("tensorrt-llm", 1), ("llamacpp", 0)):
        s = stack(policy=policy, pipeline=1)
        s.turn(s.submit("a", tuple(range(30)), 9))
        planned = s.turn(*s.steps(), s.submit("b", tuple(range(40, 71)), 2))
        assert len(planned.turn.admits) == admits  # the rest, to the last block
        s.finish()


def test_tensorrt_llm_pauses_who_came_last_and_computes_it_again(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm", blocks=4, pipeline=1)
    s.turn(*[s.submit(uid, (n, 2, 3, 4), 5) for n, uid in enumerate("abc", 1)])
    assert s.turn(*s.steps()).turn.preempts == [3]
    s.finish()
    assert s.of("c").delivered == s.solo((3, 2, 3, 4), 5) and s.of("c").ended.preemptions


# --- deepinfer -----------------------------------------------------------------------------


def test_deepinfer_marks_and_sweeps_with_the_next_schedule(stack: Stacks) -> None:
    s = stack(policy="deepinfer", max_running=1)
    s.turn(s.submit("a", A, 9), s.submit("b", B))
    decoding(s, "a")
    assert not s.turn(s.stop("s", "a", "b")).outputs.ended
    planned = s.turn()  # nothing has happened, nothing is admitted: swept nevertheless
    assert [e.uid for e in planned.outputs.ended] == ["a", "b"]
    s.finish()


def test_deepinfer_sweeps_an_idle_group(stack: Stacks) -> None:
    """Nothing runs, nothing comes back, and the one that waits is marked by a lost lease."""
    s = stack(policy="deepinfer", pipeline=1, blocks=4, model_len=16)
    got = s.group.begin_load([1, 1, 1, 1])
    assert got is not None
    s.turn(s.submit("a", tuple(range(14)), gateway="gw"))
    assert s.place("a") is Place.QUEUED and s.group.planner.next_timer() is None
    assert not s.turn(LeaseLost("gw")).outputs.ended
    assert [e.uid for e in s.turn().outputs.ended] == ["a"]
    s.group.end_load(got[0])
    s.finish()


def test_deepinfer_runs_a_prefill_to_its_end_and_delivers_its_token(stack: Stacks) -> None:
    s = stack(policy="deepinfer", max_batch_tokens=8)
    s.turn(s.submit("a", A))
    s.turn(s.stop("s", "a"))
    s.finish()
    assert s.ended("a") == ("client_cancel", 1) and s.of("a").delivered == s.solo(A, 1)


def test_deepinfer_preempts_the_longest_output_even_of_the_oldest(stack: Stacks) -> None:
    s = stack(policy="deepinfer", blocks=7, pipeline=1)
    s.turn(s.submit("long", FOUR, 9))
    s.turn(*s.steps(), s.submit("short", (9, 2, 3, 4), 9), s.submit("third", (9, 1, 3, 4), 9))
    while not (planned := s.turn(*s.steps())).turn.preempts:
        pass
    assert planned.turn.preempts == [1] and s.place("long") is Place.PREEMPTED
    s.finish()
    assert s.of("long").delivered == s.solo(FOUR, 9)


# --- native, and what all of them do -------------------------------------------------------


@pytest.mark.parametrize("policy", ["native", "vllm", "tensorrt-llm"])
def test_a_constrained_request_is_restored_with_the_state_of_its_grammar(
    stack: Stacks, policy: str
) -> None:
    s = stack(policy=policy, blocks=4, pipeline=1)
    s.turn(s.submit("warm", (1,), 1, grammar="3"))
    s.finish()
    preempted(s, grammar="3")
    s.follow(s.group.end_load(s.load))
    s.finish()
    assert s.of("a").delivered == s.solo(FOUR, 3, "3") and s.of("a").ended.preemptions == 1


def test_deepinfer_ends_a_constrained_request_that_it_preempts(stack: Stacks) -> None:
    s = stack(policy="deepinfer", blocks=4, pipeline=1)
    s.turn(s.submit("warm", (1,), 1, grammar="3"))
    s.finish()
    preempted(s, grammar="3")
    (ended,) = s.preempting.outputs.ended
    assert (ended.uid, ended.reason.value) == ("a", "preempted")
    s.follow(s.group.end_load(s.load))
    s.finish()


def test_every_policy_that_preempts_gives_the_undisturbed_output(stack: Stacks) -> None:
    for policy in POLICIES:
        s = stack(policy=policy, blocks=7, pipeline=1)
        s.turn(*[s.submit(f"r{i}", (i, 2, 3), 12) for i in range(5)])
        made = s.finish()
        assert any(p.turn.preempts for p in made) == (policy != "llamacpp")
        for i in range(5):
            assert s.of(f"r{i}").delivered == s.solo((i, 2, 3), 12)
