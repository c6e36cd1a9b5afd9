"""Six ways to stop: this sequence of events under this policy gives this order of what follows.

What a policy says of stops by place is measured in docs/stops.md; here are the orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from stopway_core.events import LeaseLost
from stopway_core.policies import POLICIES
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
    got = s.group.begin_load([1, 1, 1, 1] * blocks)
    assert got is not None
    s.load = got[0]
    while not (planned := s.turn(*s.steps())).turn.preempts:
        pass
    s.preempting = planned


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


def test_tensorrt_llm_tries_again_until_all_is_quiet_and_delivers_what_came(
    stack: Stacks,
) -> None:
    s = stack(policy="tensorrt-llm", pipeline=1, window=2)
    s.turn(s.submit("a", A, 9))
    s.advance()
    assert s.place("a") is Place.OVERLAPPED
    assert not s.turn(s.stop("s", "a")).outputs.ended
    assert not s.turn(s.group.run_oldest()).outputs.ended  # it is in another step
    planned = s.turn(s.group.run_oldest())
    assert [(e.uid, e.keep, e.discarded_tokens) for e in planned.outputs.ended] == [("a", 3, 0)]
    assert s.of("a").delivered == s.solo(A, 3)
    s.finish()


def test_tensorrt_llm_lets_a_cancel_outlive_the_end_of_a_preemption(stack: Stacks) -> None:
    s = stack(policy="tensorrt-llm", blocks=3, window=2)
    s.turn(s.submit("b", (9, 2, 3, 4), 3))
    s.turn(s.submit("a", (*FOUR, 9), 3))
    assert s.turn(s.group.run_oldest()).turn.preempts == [2]
    planned = s.turn(s.stop("s", "a"))
    assert not planned.outputs.ended  # its pages are still being written
    planned = s.turn(s.group.run_oldest())
    assert [e.uid for e in planned.outputs.ended] == ["a"] and not planned.turn.admits
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


def test_deepinfer_preempts_the_longest_output(stack: Stacks) -> None:
    s = stack(policy="deepinfer", blocks=7, pipeline=1)
    s.turn(s.submit("first", (40, 41), 9), s.submit("long", FOUR, 9))
    s.turn(*s.steps(), s.submit("short", (9, 2, 3, 4), 9), s.submit("third", (9, 1, 3, 4), 9))
    while not (planned := s.turn(*s.steps())).turn.preempts:
        pass
    (rid,) = planned.turn.preempts
    assert rid == 2 and s.group.planner.requests.live("long")[0].preemptions == 1
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
        s = stack(policy=policy, blocks=8, pipeline=1)
        s.turn(*[s.submit(f"r{i}", (i, 2, 3), 12) for i in range(5)])
        made = s.finish()
        assert any(p.turn.preempts for p in made) == (policy != "llamacpp")
        for i in range(5):
            assert s.of(f"r{i}").delivered == s.solo((i, 2, 3), 12)
