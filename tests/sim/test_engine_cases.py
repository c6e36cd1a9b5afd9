"""Sequences that went wrong in other engines, by their case numbers.

| case | what | where |
|---|---|---|
| e01 | deadlines where ranks' clocks differ | here; clocks 1 s apart: test_worlds.py |
| e02 | cancels between admitted and applied | here |
| e03 | tokens of a cancelled request reach no other | here |
| e04 | blocks used again under steps in flight | here; off-queue writers in test_off_queue.py |
| e05 | a cancel in the last forward | here |
| e06 | deadlines while no step can run | here |
| e07 | one rank alone in trouble | here; tests/stack/test_faults.py with processes |
| e08 | a cancel in a chunk, the same prompt again | here |
| e09 | preempted with drafts in flight | here |
| e10 | one prefix in one step | here |
| e11 | a cancel after the last chunk | here |
| e12 | finished and preempted in one turn | here; freed twice: core/test_ledger_model.py |
| e13 | all choices or none | here |
| e14 | what can never fit | here |
| e15 | a request that outgrows the pool | here |
| e16 | stop strings over token borders | tests/engine/test_front_text.py |
| e17 | a character split over tokens | tests/engine/test_front_text.py |
| e18 | an idle group wakes | here |
| e19 | spans of a request without a first token | tests/stack/test_stops.py |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stopway_core.events import Completed
from stopway_core.types import Deadlines
from stopway_sim.places import Place

if TYPE_CHECKING:
    from .conftest import Stack

    Stacks = Callable[..., Stack]

A = tuple(range(1, 12))
B = tuple(range(20, 31))


def test_case_e01_one_clock_decides_which_deadlines_have_passed(stack: Stacks) -> None:
    s = stack(tensor=2, pipeline=1, max_running=2)
    limit = Deadlines(total=10.0)
    s.turn(*[s.submit(f"r{i}", (i + 1, 2, 3), 30, deadlines=limit) for i in range(4)])
    s.now += 0.04
    s.turn(s.submit("late", (9, 9), 30, deadlines=limit), *s.steps())
    s.now = 1010.0  # the first four are due, the fifth is 40 ms later: ranks apart would differ
    planned = s.turn(*s.steps())
    assert sorted(e.uid for e in planned.outputs.ended) == ["r0", "r1", "r2", "r3"]
    assert {e.reason.value for e in planned.outputs.ended} == {"deadline_total"}
    assert [a.rid for a in planned.turn.admits] == [3]
    seqs = [list(rank.replica.seqs) for rank in s.group.ranks]
    assert seqs == [[3], [3]]
    s.finish()
    assert s.ended("late") == ("length", 30)


def test_case_e02_cancels_between_admitted_and_applied(stack: Stacks) -> None:
    s = stack(pipeline=3, max_batch_tokens=64)
    s.held = []
    s.turn(*[s.submit(f"r{i}", (i + 1, 2, 3)) for i in range(5)])
    burst = [s.stop(f"s{i}", f"r{i}") for i in range(4)]
    s.turn(*burst)
    s.turn(s.stop("later", "r0"))  # a new decision about what is decided
    assert s.group.receipts.get("later").status == "already_finished"
    frames, s.held = s.held, None
    applied = s.follow(*frames)
    for rank in s.group.ranks[1:]:
        assert list(rank.replica.seqs) == [5]
    assert sum(len(a.ended) for a in applied) == 4 * 2  # once a stage
    s.finish()
    assert [s.ended(f"r{i}")[0] for i in range(5)] == ["client_cancel"] * 4 + ["length"]


def test_case_e03_tokens_of_a_cancelled_request_reach_no_other(stack: Stacks) -> None:
    s = stack()
    s.turn(s.submit("x", A))
    s.turn(s.stop("s", "x"))
    again = s.turn(s.submit("x", A))  # the id itself never names another request
    assert [r.code for r in again.outputs.refused] == ["duplicate"]
    drained = s.turn(s.submit("y", A), *s.steps())
    assert drained.outputs.tokens == []  # X's step has drained; its token is nobody's
    s.finish()
    assert s.ended("x") == ("client_cancel", 0) and s.of("x").ended.discarded_tokens == 1
    assert s.of("y").delivered == s.solo(A, 4)
    pool = s.group.ranks[0].replica.ledger.blocks
    assert min(pool.refs) == 0 and s.counts[2] == 0


def test_case_e03_in_two_steps_at_once(stack: Stacks) -> None:
    s = stack(window=2, max_batch_tokens=8)
    s.turn(s.submit("x", A))
    s.turn()
    s.turn(s.stop("s", "x"), s.submit("y", A))
    s.finish()
    assert s.of("x").delivered == [] and s.of("y").delivered == s.solo(A, 4)


def test_case_e04_blocks_of_a_finished_request_are_used_before_the_next_step_is_done(
    stack: Stacks,
) -> None:
    """Ordered writers: step N ends A, N+1 is in flight, B is admitted into A's blocks."""
    s = stack(blocks=6, window=2, max_batch_tokens=32)
    s.turn(s.submit("a", A, 1))  # step 1: 3 blocks
    s.turn(s.submit("c", (50, 51, 52), 6))  # step 2: 1 block
    first, result = (s.group.execute(rank) for rank in s.group.ranks)
    assert first is None and result is not None  # stage 1 of 2 has it
    planned = s.turn(Completed(result), s.submit("b", B, 4))
    assert [e.uid for e in planned.outputs.ended] == [
        "a"
    ] and 2 in s.group.planner.replica.in_flight
    used = set(s.group.planner.replica.seqs[3].blocks)
    assert used & {0, 1, 2}, "B is to get a block that was A's"
    s.finish()
    assert s.of("b").delivered == s.solo(B, 4)
    assert s.of("c").delivered == s.solo((50, 51, 52), 6)


def test_case_e04_blocks_of_a_stopped_request_are_used_while_its_steps_still_write(
    stack: Stacks,
) -> None:
    s = stack(blocks=3, pipeline=3, window=3, max_batch_tokens=12)
    s.turn(s.submit("a", A))
    s.turn()  # two chunks in flight, none executed
    s.turn(s.stop("s", "a"), s.submit("b", B, 1))  # b's chunks go behind them, to the same blocks
    assert set(s.group.planner.replica.seqs[2].blocks) == {0, 1, 2}
    s.finish()
    assert s.of("b").delivered == s.solo(B, 1)


def test_case_e05_a_cancel_during_the_last_forward(stack: Stacks) -> None:
    s = stack()
    s.turn(s.submit("a", A, 1))
    results = s.steps()
    s.turn(s.stop("s", "a"))  # the forward has run, its result is on the way
    late = s.turn(*results)
    assert late.outputs.empty
    s.finish()
    assert s.ended("a") == ("client_cancel", 0) and s.counts[2] == 0


def test_case_e06_deadlines_are_kept_while_no_step_can_run(stack: Stacks) -> None:
    s = stack(blocks=4, pipeline=1, model_len=16)
    load, _ = s.group.begin_load([1, 2, 3, 4, 5, 6, 7, 8])  # a transfer holds half of the pool
    planned = s.turn(s.submit("a", A, 1, deadlines=Deadlines(queue=1.0)), s.submit("b", B, 2))
    assert planned.turn.launch is None and s.group.planner.next_timer() == 1001.0
    s.now += 1.0
    assert [e.reason.value for e in s.turn().outputs.ended] == ["deadline_queue"]
    s.group.end_load(load)  # it times out, or comes to an end
    assert s.turn().turn.admits  # service recovers
    s.finish()
    assert s.of("b").delivered == s.solo(B, 2)


def test_case_e07_one_rank_alone_in_trouble_stops_no_other(stack: Stacks) -> None:
    """A follower that has not heard of anything holds up nothing but its own steps.

    Here it gets no frame while the others end a request by its deadline: there is no collective
    that they would have to meet it in, and it does the same later.
    """
    s = stack(tensor=2, pipeline=2, window=2)
    s.turn(s.submit("a", A, deadlines=Deadlines(total=1.0)), s.submit("b", B))
    stuck = s.group.ranks[3]
    kept: list[bytes] = []
    s.now += 1.0
    got = s.group.turn(s.now, [])
    assert got is not None and [e.uid for e in got[0].outputs.ended] == ["a"]
    s.truth.after_turn(got[0], s.now)
    for rank in s.group.ranks[1:]:
        if rank is stuck:
            kept.append(got[1])
        else:
            s.group.deliver(rank, got[1])
    assert [list(rank.replica.seqs) for rank in s.group.ranks] == [[2], [2], [2], [1, 2]]
    done = s.steps()  # the step that was launched before needs no word about it
    assert {rank.executed for rank in s.group.ranks} == {1}
    s.group.deliver(stuck, kept[0])
    assert list(stuck.replica.seqs) == [2]
    s.turn(*done)
    s.finish()
    assert s.ended("a") == ("deadline_total", 0) and s.of("b").delivered == s.solo(B, 4)


def test_case_e08_a_cancel_in_the_second_chunk_shares_no_unfilled_block(stack: Stacks) -> None:
    s = stack(max_batch_tokens=8, window=2)
    s.turn(s.submit("a", A))
    s.turn()  # chunk 2 is in flight too
    _, result = (s.group.execute(rank) for rank in s.group.ranks)
    assert result is not None
    s.turn(Completed(result))  # chunk 1 is confirmed, chunk 3 launched
    s.turn(s.stop("s", "a"), s.submit("b", A))
    s.turn(*s.steps())
    assert s.group.planner.requests.live("b")[0].cached_tokens == 4  # chunk 1 and no more
    s.finish()
    assert s.of("b").delivered == s.solo(A, 4)


def test_case_e09_a_preempted_request_goes_on_as_if_it_had_not_been(stack: Stacks) -> None:
    s = stack(blocks=6, window=2, max_batch_tokens=32)
    s.turn(s.submit("a", A, 9), s.submit("b", B, 9))
    made = s.finish()
    assert sum(len(p.turn.preempts) for p in made) > 0
    assert s.of("a").delivered == s.solo(A, 9) and s.of("b").delivered == s.solo(B, 9)
    assert s.ended("b") == ("length", 9)


# Every three tokens of a vocabulary of three: a draft follows whatever was sampled.
TRIPLES = (0, 0, 0, 1, 0, 0, 2, 0, 1, 1, 0, 1, 2, 0, 2, 1, 0, 2, 2, 1, 1, 1, 2, 1, 2, 2, 2, 0, 0)


def test_case_e09_preempted_with_drafts_in_flight(stack: Stacks) -> None:
    """Delivered once though they were in flight, none lost, none stale, and paid for in budget."""
    s = stack(blocks=15, window=2, vocab=3, draft_tokens=3, max_batch_tokens=64)
    short = TRIPLES[26::-1]  # its second token needs a block when B's drafts are in flight
    s.turn(s.submit("a", short, 12), s.submit("b", TRIPLES, 12))
    s.settle()
    planner = s.group.planner
    while s.place("b") is not Place.DRAFT:
        s.advance()
    (planned,) = s.advance()
    assert planned.turn.preempts == [2] and s.place("b") is Place.STALE
    had = s.of("b").delivered[:]
    s.advance()
    fresh = s.of("b").delivered[len(had) :]
    assert fresh and s.place("b") is Place.PREEMPTED  # they were in flight, and came once
    assert planner.drafted_tokens >= 2
    for made in s.finish():
        if made.turn.launch is not None:
            assert made.turn.launch.tokens <= planner.config.step_tokens
    assert s.of("a").delivered == s.solo(short, 12) and s.of("b").delivered == s.solo(TRIPLES, 12)
    ended = s.of("b").ended
    assert ended is not None and (ended.reason.value, ended.keep) == ("length", 12)
    assert ended.discarded_tokens == 0 and ended.preemptions == 1


def test_case_e10_one_prefix_in_one_step_and_the_first_is_cancelled(stack: Stacks) -> None:
    s = stack(max_batch_tokens=64)
    prompts = [(*A[:8], 60 + i) for i in range(4)]
    s.turn(*[s.submit(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    tables = [seq.blocks for seq in s.group.planner.replica.seqs.values()]
    assert len({b for table in tables for b in table}) == 12  # nothing is shared before it is full
    s.turn(s.stop("s", "r0"))
    s.turn(s.submit("r4", A), *s.steps())
    assert s.group.planner.requests.live("r4")[0].cached_tokens == 8  # now it is
    s.finish()
    for index, prompt in enumerate(prompts[1:], 1):
        assert s.of(f"r{index}").delivered == s.solo(prompt, 4)
    assert s.of("r4").delivered == s.solo(A, 4)


def test_case_e11_a_cancel_after_the_last_chunk_was_launched(stack: Stacks) -> None:
    s = stack(max_batch_tokens=16)
    before = s.counts
    s.turn(s.submit("a", A))
    s.turn(*s.steps())  # the last chunk is on its way
    stopped = s.turn(s.stop("s", "a"))
    assert stopped.outputs.tokens == []
    late = s.turn(*s.steps())
    assert late.outputs.empty and late.turn.launch is None
    s.finish()
    free, cached, held = s.counts
    assert (free + cached, held) == (sum(before), 0) and cached == 2  # the confirmed chunk's
    assert s.ended("a") == ("client_cancel", 0)


def test_case_e12_finished_and_about_to_be_preempted_in_one_turn(stack: Stacks) -> None:
    s = stack(blocks=3, pipeline=1)
    s.turn(s.submit("a", (1, 2, 3, 4), 6), s.submit("b", (5, 6, 7, 8), 1))
    planned = s.turn(*s.steps())  # a needs the block that b's end brings
    assert [e.uid for e in planned.outputs.ended] == ["b"]
    assert planned.turn.ends == [2] and planned.turn.preempts == []
    s.finish()
    assert s.ended("a") == ("length", 6)


def test_case_e12_stopped_and_about_to_be_preempted_in_one_turn(stack: Stacks) -> None:
    s = stack(blocks=2, pipeline=1)
    s.turn(s.submit("a", (1, 2, 3, 4), 4), s.submit("b", (5, 6, 7, 8), 4))
    planned = s.turn(s.stop("s", "b"), *s.steps())
    assert planned.turn.ends == [2] and planned.turn.preempts == []
    assert planned.stops[0].dropped == (0, 1, 0)
    s.finish()


def test_case_e13_a_parent_is_cancelled_while_half_of_it_waits(stack: Stacks) -> None:
    s = stack(max_running=2)
    s.turn(s.submit("p", A, choices=4))
    s.turn(*s.steps())  # the first has the prompt, the second forks it
    assert (s.group.planner.running, s.group.planner.waiting) == (2, 2)
    s.turn(s.stop("s", "p"))
    requests = s.group.planner.requests
    assert not requests.by_key and not requests._by_uid
    s.finish()
    assert [s.ended("p", i)[0] for i in range(4)] == ["client_cancel"] * 4
    assert s.group.receipts.get("s").outcomes == {"stopped": 4}


def test_case_e13_choices_are_refused_together(stack: Stacks) -> None:
    s = stack(max_running=1, max_waiting=5)
    s.turn(s.submit("a", A), s.submit("b", B))
    planned = s.turn(s.submit("p", A, choices=5))
    assert [r.code for r in planned.outputs.refused] == ["queue_full"]
    assert "p" not in s.group.planner.requests and s.group.planner.waiting == 1
    s.finish()


def test_case_e14_a_prompt_that_can_never_fit_is_refused_with_both_numbers(stack: Stacks) -> None:
    s = stack(blocks=49, size=16, model_len=4096, max_batch_tokens=512)
    prompt = tuple(i % 90 for i in range(62 * 16 + 5))
    planned = s.turn(s.submit("big", prompt), s.submit("next", A))
    (refused,) = planned.outputs.refused
    assert (refused.uid, refused.status) == ("big", 400)
    assert "63 KV blocks" in refused.message and "has 49" in refused.message
    assert len(planned.turn.admits) == 1
    s.finish()
    assert s.of("next").delivered == s.solo(A, 4)


def test_case_e15_a_lone_request_outgrows_the_pool(stack: Stacks) -> None:
    s = stack(blocks=50, size=16, model_len=57 * 16, pipeline=1, max_batch_tokens=512)
    prompt = tuple(i % 90 for i in range(49 * 16))
    s.turn(s.submit("a", prompt, 57 * 16 - len(prompt)))
    made = s.finish()
    assert s.ended("a") == ("length", 50 * 16 - len(prompt))
    assert sum(len(p.turn.preempts) for p in made) == 0


def test_case_e15_a_cancel_works_where_two_push_each_other_out(stack: Stacks) -> None:
    s = stack(blocks=4, pipeline=1)
    s.turn(s.submit("a", (1, 2, 3), 12), s.submit("b", (4, 5, 6), 12))
    while not s.turn(*s.steps()).turn.preempts:
        pass
    s.turn(s.stop("s", "b"))
    s.finish()
    assert s.ended("a") == ("length", 12) and s.ended("b")[0] == "client_cancel"


def test_case_e18_an_idle_group_wakes_on_one_request_on_every_rank(stack: Stacks) -> None:
    s = stack(tensor=2, pipeline=2)
    for index in range(3):
        assert s.group.turn(s.now, []) is None and s.group.planner.next_timer() is None
        s.turn(s.submit(f"r{index}", A))
        s.finish()
        assert s.of(f"r{index}").delivered == s.solo(A, 4)
        assert {rank.executed for rank in s.group.ranks} == {s.group.planner.replica.step}
