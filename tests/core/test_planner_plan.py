"""Admission, chunks, room, preemption: what goes into a step, and what never does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from stopway_core.policies.victims import least_wasted_work
from stopway_core.policy import Candidate

if TYPE_CHECKING:
    from .conftest import Rig

    Rigs = Callable[..., Rig]


def chunks(planned: object) -> dict[int, int]:
    launch = planned.turn.launch  # type: ignore[attr-defined]
    return dict(zip(launch.prefill, launch.counts, strict=True))


# --- admission -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "config", "status", "code", "numbers"),
    [
        (0, {}, 400, "empty_prompt", ()),
        (20, {"max_model_len": 20}, 400, "context_length_exceeded", ("20",)),
        (64, {}, 400, "kv_capacity_exceeded", ("17", "16")),
        (65, {"max_model_len": 70}, 400, "kv_capacity_exceeded", ("17", "16", "63")),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    rig: Rigs, prompt: int, config: dict[str, int], status: int, code: str, numbers: tuple[str, ...]
) -> None:
    r = rig(**config)
    planned = r.turn(r.submit("a", prompt), r.submit("b"))
    (refused,) = planned.outputs.refused
    assert (refused.uid, refused.status, refused.code) == ("a", status, code)
    for number in numbers:
        assert number in refused.message
    assert [a.rid for a in planned.turn.admits] == [1]  # the queue behind it moves


def test_the_longest_prompt_that_fits_is_served(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", 63, max_tokens=50))
    (last,) = r.run()
    assert [(e.reason.value, e.keep) for e in last.outputs.ended] == [("length", 1)]


def test_a_full_queue_refuses_all_choices_of_a_request_or_none(rig: Rigs) -> None:
    r = rig(max_waiting=3)
    planned = r.turn(r.submit("a", choices=2), r.submit("b", choices=2), r.submit("c"))
    assert [(x.uid, x.status) for x in planned.outputs.refused] == [("b", 429)]
    assert "b" not in r.planner.requests and "b.0" not in r.planner.requests
    assert [len(a.keys) for a in planned.outputs.accepted] == [2, 1]


def test_the_head_of_the_queue_is_not_passed(rig: Rigs) -> None:
    r = rig(blocks=4)
    r.turn(r.submit("a", 9))
    r.turn(r.submit("b", 9), r.submit("c", 2))
    assert (r.planner.running, r.planner.waiting) == (1, 2)


def test_blocks_for_those_who_decode_are_left_free(rig: Rigs) -> None:
    r = rig(blocks=3)
    r.turn(r.submit("a", 4))
    planned = r.turn(r.result(), r.submit("b", [9] * 8))  # a needs one now; b would take both
    assert planned.turn.admits == [] and planned.turn.launch.decode == [1]


def test_a_reserve_grows_with_the_number_that_run(rig: Rigs) -> None:
    r = rig(blocks=64, max_running=64, max_batch_tokens=512)
    r.turn(*[r.submit(f"a{i}", [i + 1] * 3, max_tokens=40) for i in range(4)])
    assert r.planner.running == 4  # 60 blocks are left
    planned = r.turn(r.submit("b", [99] * 57 * 4), r.result())
    assert planned.turn.admits == []  # 57 and a reserve of 4 would leave less
    planned = r.turn(r.stop("s", "b"), r.submit("c", [98] * 55 * 4), r.result())
    assert len(planned.turn.admits) == 1


def test_when_blocks_come_back_the_head_is_looked_at_again(rig: Rigs) -> None:
    r = rig(blocks=4)
    r.turn(r.submit("a", [8] * 9, max_tokens=1), r.submit("b", [9] * 9, max_tokens=1))
    planned = r.turn(r.result())
    assert [a.rid for a in planned.turn.admits] == [2]


# --- a step --------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes(rig: Rigs) -> None:
    r = rig(max_batch_tokens=8)
    r.turn(r.submit("a", 3, max_tokens=30))
    planned = r.turn(r.result(), r.submit("b", [9] * 18))
    assert planned.turn.launch.decode == [1] and chunks(planned) == {2: 7}
    planned = r.turn(r.result())
    assert planned.turn.launch.decode == [1] and chunks(planned) == {2: 7}
    planned = r.turn(r.result())
    assert chunks(planned) == {2: 4}
    assert [row.samples for row in planned.work.rows] == [1, 1]
    assert len(r.turn(r.result()).outputs.tokens) == 2


def test_several_chunks_of_one_prompt_may_be_in_flight(rig: Rigs) -> None:
    r = rig(max_batch_tokens=12, stages=3, window=3)
    assert chunks(r.turn(r.submit("a", 10, max_tokens=1))) == {1: 4}
    assert chunks(r.turn()) == {1: 4}
    assert chunks(r.turn()) == {1: 2}
    assert r.maybe() is None  # the window is full
    planned = r.turn(r.result(), r.result(skip=1), r.result(skip=2))
    assert [e.keep for e in planned.outputs.ended] == [1]


def test_a_request_decodes_in_one_step_at_a_time(rig: Rigs) -> None:
    r = rig(stages=2, window=2)
    r.turn(r.submit("a"))
    assert r.maybe() is None
    planned = r.turn(r.result(), r.submit("b"))
    assert planned.turn.launch.decode == [1] and chunks(planned) == {2: 4}
    assert r.maybe() is None


def test_no_step_has_more_tokens_than_it_may(rig: Rigs) -> None:
    r = rig(max_batch_tokens=4, window=2, blocks=64)
    r.turn(*[r.submit(f"a{i}", [i + 1, 50, 51], max_tokens=9) for i in range(12)])
    for _ in range(40):
        r.maybe()
        if not r.replica.in_flight:
            break
        events = [r.result(skip=index) for index in range(len(r.replica.in_flight))]
        launch = r.turn(*events).turn.launch
        if launch is not None:
            assert len(launch.decode) + sum(launch.counts) <= 4
    assert not r.planner.requests.by_key


def test_requests_with_one_prefix_share_what_is_filled_and_only_that(rig: Rigs) -> None:
    r = rig(window=2)
    r.turn(r.submit("a", 9))
    assert chunks(r.turn(r.submit("b", 9))) == {2: 9}  # a's step has yet to fill them
    r.turn(r.result(), r.submit("c", 9))
    assert [r.replica.seqs[rid].cached_tokens for rid in (1, 2, 3)] == [0, 0, 8]
    refs = r.replica.ledger.blocks.refs
    assert [refs[block] for block in r.replica.seqs[3].blocks] == [3, 3, 1]


# --- preemption ----------------------------------------------------------------------------


def test_the_youngest_goes_where_all_cost_the_same_and_comes_back_first(rig: Rigs) -> None:
    r = rig(blocks=4)
    r.turn(*[r.submit(uid, [n] * 4, max_tokens=9) for n, uid in enumerate(("a", "b", "c"), 1)])
    r.turn(r.submit("d", [4] * 4), r.result())
    # a, b and c need a block each and one is left: c goes, and then there are two.
    head = r.planner.schedule.waiting.head()
    assert head is not None and head.uid == "c" and r.planner.waiting == 2
    assert r.planner.running == 2
    chosen = r.planner.requests.live("c")[0]
    assert chosen.preemptions == 1 and chosen.seq is None and chosen.output_len == 1


def test_a_preempted_request_takes_up_where_it_was(rig: Rigs) -> None:
    r = rig(blocks=3)
    r.turn(r.submit("a", [1] * 4, max_tokens=4), r.submit("b", [2] * 4, max_tokens=4))
    out: dict[int, list[int]] = {1: [7], 2: [8]}
    planned = r.turn(r.result(7, 8))
    assert planned.turn.preempts == [2]
    token = 10
    for _ in range(20):
        if not r.replica.in_flight:
            break
        token += 1
        planned = r.turn(r.result(*[token] * r._rows()))
        for key, got in zip(planned.outputs.keys, planned.outputs.tokens, strict=True):
            out[key].append(got)
        for ended in planned.outputs.ended:
            assert (ended.keep, ended.discarded_tokens) == (4, 0)
        if planned.turn.admits:
            assert planned.turn.admits[0].tokens[:5] == [2] * 4 + [8]
            assert planned.turn.admits[0].prompt_len == 4
    assert [len(tokens) for tokens in out.values()] == [4, 4]
    assert r.counts[2] == 0


def test_the_oldest_always_gets_on(rig: Rigs) -> None:
    r = rig(blocks=4)
    r.turn(*[r.submit(f"a{i}", [i + 1] * 3, max_tokens=13) for i in range(6)])
    finished = [e.uid for p in r.run() for e in p.outputs.ended]
    assert finished == [f"a{i}" for i in range(6)]


def candidate(rid: int, recompute: int, frees: int, arrival: int = 0) -> Candidate:
    return Candidate(rid, arrival or rid, 0, 1, recompute, frees)


@pytest.mark.parametrize(
    ("candidates", "short", "chosen"),
    [
        ([], 1, None),
        ([candidate(1, 9, 2), candidate(2, 5, 1)], 1, 2),
        ([candidate(1, 9, 2), candidate(2, 5, 1)], 2, 1),  # alone enough
        ([candidate(1, 5, 1), candidate(2, 5, 1)], 1, 2),  # the younger
        ([candidate(1, 9, 3), candidate(2, 8, 2)], 5, 1),  # the most a recomputed token
    ],
)
def test_the_native_victim(candidates: list[Candidate], short: int, chosen: int | None) -> None:
    victim = least_wasted_work(candidates, short)
    assert (victim.rid if victim else None) == chosen


def test_shared_blocks_are_no_reason_to_go(rig: Rigs) -> None:
    r = rig(blocks=6)
    r.turn(r.submit("a", [1] * 8 + [2, 3, 4, 5], max_tokens=8))
    r.turn(r.result())
    r.turn(r.result(), r.submit("b", [1] * 8 + [9], max_tokens=3))
    pool = r.replica.ledger.blocks
    (b,) = r.planner.requests.live("b")
    assert b.seq is not None and pool.exclusive(b.seq.holder) == 1 and len(b.seq.blocks) == 3


def test_a_lone_request_ends_when_all_blocks_are_its(rig: Rigs) -> None:
    r = rig(blocks=4, max_model_len=1000)
    r.turn(r.submit("a", 5, max_tokens=500))
    made = r.run()
    (ended,) = made[-1].outputs.ended
    assert (ended.reason.value, ended.keep, ended.preemptions) == ("length", 16 - 5, 0)
    assert r.counts[2] == 0


def test_an_idle_planner_makes_no_turns(rig: Rigs) -> None:
    r = rig()
    assert r.maybe() is None and r.planner.next_timer() is None
    r.turn(r.submit("a", max_tokens=1))
    r.turn(r.result())
    assert r.maybe() is None and r.replica.turn == 2
