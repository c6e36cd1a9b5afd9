"""What goes into a step where steps overlap, stages take turns, drafts are made, prompts forked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from stopway_core.types import DROPPED, Deadlines

if TYPE_CHECKING:
    from .conftest import Rig

    Rigs = Callable[..., Rig]

REPEATS = [1, 2, 3, 4, 5, 6, 1, 2]  # a 3 brings the draft 4 5 6


def launch(planned: object) -> tuple[list[int], list[int]]:
    made = planned.turn.launch  # type: ignore[attr-defined]
    return (made.decode, made.prefill) if made else ([], [])


# --- overlap -------------------------------------------------------------------------------


def test_the_next_step_takes_the_token_that_only_the_sampler_has(rig: Rigs) -> None:
    r = rig(window=2)
    r.turn(r.submit("a"), r.submit("b"))
    assert r.maybe() is None  # their prompts are in flight: nothing follows a first token
    r.turn(r.result(7, 8))
    (first, second) = r.turn().work.rows
    assert (first.tokens, first.source, first.start) == ([0], (2, 0), 5)
    assert (second.tokens, second.source, second.start) == ([0], (2, 1), 5)
    assert r.maybe() is None  # the window is full
    planned = r.turn(r.result(17, 18))
    assert [row.source for row in planned.work.rows] == [(3, 0), (3, 1)]
    assert r.replica.seqs[1].tokens == [1, 2, 3, 4, 7, 17]


def test_no_step_is_launched_beyond_the_last_token(rig: Rigs) -> None:
    r = rig(window=2)
    r.turn(r.submit("a", max_tokens=3))
    r.turn(r.result())
    assert launch(r.turn()) == ([1], [])  # for the third
    assert r.maybe() is None
    assert r.maybe(r.result()) is not None and len(r.replica.in_flight) == 1
    (ended,) = r.turn(r.result()).outputs.ended
    assert (ended.reason.value, ended.keep, ended.discarded_tokens) == ("length", 3, 0)


@pytest.mark.parametrize("together", [False, True])
def test_what_was_launched_behind_an_end_is_discarded(rig: Rigs, together: bool) -> None:
    r = rig(window=2)
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result())
    r.turn()
    if together:
        planned = r.turn(r.result(r.EOS), r.result(9, skip=1))
    else:
        planned = r.turn(r.result(r.EOS))
        r.turn(r.result(DROPPED))
    (ended,) = planned.outputs.ended
    assert (ended.reason.value, ended.keep, ended.discarded_tokens) == ("eos", 2, 1)
    assert planned.outputs.tokens == [r.EOS] and r.counts[2] == 0


def test_with_drafts_nothing_overlaps(rig: Rigs) -> None:
    r = rig(window=2, draft_tokens=2)
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result())
    assert r.maybe() is None


# --- stages --------------------------------------------------------------------------------


def test_stages_share_who_decodes_among_the_steps_of_the_window(rig: Rigs) -> None:
    r = rig(stages=3, window=3, blocks=64)
    r.turn(*[r.submit(f"r{i}", [i + 1] * 3, max_tokens=9) for i in range(7)])
    steps = [launch(r.turn(r.result()))[0]] + [launch(r.turn())[0] for _ in range(2)]
    assert steps == [[1, 2, 3], [4, 5, 6], [7]]
    assert launch(r.turn(r.result()))[0] == [1, 2, 3]


def test_a_step_has_its_share_of_the_tokens(rig: Rigs) -> None:
    r = rig(stages=2, window=2, max_batch_tokens=15, blocks=64)
    counts = [r.turn(r.submit("a", 30)).turn.launch.counts, r.turn().turn.launch.counts]
    assert counts == [[8], [7]]  # 15 in flight, 8 in one


# --- drafts --------------------------------------------------------------------------------


def drafted(rig: Rigs, **config: object) -> Rig:
    r = rig(draft_tokens=3, **{"blocks": 32, **config})
    r.turn(r.submit("a", REPEATS, max_tokens=9))
    return r


def test_drafts_are_verified_in_one_step(rig: Rigs) -> None:
    r = drafted(rig)
    planned = r.turn(r.result(3))
    (row,) = planned.work.rows
    assert planned.turn.launch.drafts == [[4, 5, 6]] and planned.turn.launch.tokens == 4
    assert (row.tokens, row.samples, row.start) == ([3, 4, 5, 6], 4, 8)
    planned = r.turn(r.rows([4, 5, 9]))
    assert planned.outputs.tokens == [4, 5, 9]
    seq = r.replica.seqs[1]
    assert (seq.confirmed, seq.launched, len(seq.tokens)) == (11, 12, 12)
    assert (r.planner.drafted_tokens, r.planner.accepted_tokens) == (3, 2)


def test_drafts_stay_within_the_tokens_of_a_step(rig: Rigs) -> None:
    r = drafted(rig, max_batch_tokens=8)
    assert r.turn(r.result(3), r.submit("b", [9] * 5)).turn.launch.drafts == [[4, 5]]


def test_drafts_take_only_blocks_that_are_to_spare(rig: Rigs) -> None:
    r = drafted(rig, blocks=4)
    assert r.turn(r.result(3)).turn.launch.drafts == [[4, 5, 6]]
    r = rig(draft_tokens=3, blocks=5)
    r.turn(r.submit("a", [*REPEATS, 9, 1, 2], max_tokens=9), r.submit("b", 4, max_tokens=9))
    planned = r.turn(r.result(3, 7))  # b needs the last block, and a has one position left
    assert planned.turn.launch.drafts == [] and planned.turn.preempts == []


def test_drafts_do_not_go_beyond_the_last_token(rig: Rigs) -> None:
    r = rig(draft_tokens=3, blocks=32)
    r.turn(r.submit("a", REPEATS, max_tokens=3))
    assert r.turn(r.result(3)).turn.launch.drafts == [[4]]
    (ended,) = r.turn(r.rows([4, 5])).outputs.ended
    assert (ended.reason.value, ended.keep, ended.accepted_tokens) == ("length", 3, 1)


def test_what_comes_after_an_end_within_drafts_is_discarded(rig: Rigs) -> None:
    r = rig(draft_tokens=3, blocks=32)
    r.turn(r.submit("a", [1, 2, 3, 4, 0, 6, 1, 2], max_tokens=9))
    r.turn(r.result(3))
    planned = r.turn(r.rows([4, 0, 6, 7]))
    (ended,) = planned.outputs.ended
    assert planned.outputs.tokens == [4, 0]
    assert (ended.reason.value, ended.keep, ended.discarded_tokens) == ("eos", 3, 2)


def test_acceptance_counts_every_completed_step_delivered_or_not(rig: Rigs) -> None:
    r = drafted(rig)
    r.turn(r.result(3))
    planned = r.turn(r.stop("s", "a"))
    assert planned.outputs.ended[0].drafted_tokens == 0  # nothing of it had completed by then
    r.turn(r.rows([4, 9]))
    assert (r.planner.drafted_tokens, r.planner.accepted_tokens) == (3, 1)
    r = drafted(rig)
    r.turn(r.result(3))
    r.turn(r.stop("s", "a"))
    r.turn(r.rows([DROPPED]))
    assert r.planner.drafted_tokens == 0  # it verified nothing


# --- room ----------------------------------------------------------------------------------


def test_a_more_important_request_takes_the_place_of_others(rig: Rigs) -> None:
    r = rig(blocks=6)
    r.turn(*[r.submit(f"r{i}", [i + 1] * 7, max_tokens=9, priority=2) for i in range(3)])
    planned = r.turn(r.submit("now", [9] * 11, max_tokens=1, priority=1), r.result())
    assert planned.turn.preempts == [3, 2] and launch(planned) == ([1], [4])
    r.turn(r.submit("late", [8] * 3, priority=2), r.result())
    assert [c.uid for c in r.planner.requests.by_key.values() if c.seq is None] == ["r2", "late"]


def test_a_seat_is_reason_enough(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("a", priority=1))
    planned = r.turn(r.result(), r.submit("b", priority=1), r.submit("now"))
    assert planned.turn.preempts == [1] and [a.rid for a in planned.turn.admits] == [2]
    assert r.planner.requests.live("now")[0].rid == 2


def test_who_is_as_important_yields_to_nobody(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("a", priority=1))
    others = r.submit("b", priority=1), r.submit("c", priority=2)
    assert r.turn(r.result(), *others).turn.preempts == []


def test_a_chunk_whose_request_is_pushed_out_leaves_its_step(rig: Rigs) -> None:
    r = rig(blocks=4, max_batch_tokens=8)
    r.turn(r.submit("a", 13, max_tokens=1, priority=1))
    planned = r.turn(r.result(), r.submit("now", [9, 9], max_tokens=1))
    assert planned.turn.preempts == [1] and launch(planned) == ([], [2])
    assert sorted(e.uid for p in r.run() for e in p.outputs.ended) == ["a", "now"]


def test_who_is_pushed_out_and_comes_back_at_once_does_not_decode(rig: Rigs) -> None:
    r = rig(blocks=7)
    prefix = list(range(1, 9))  # computed twice: going, A frees both blocks, and finds the others
    r.turn(
        r.submit("old", [*prefix, 20], max_tokens=9),
        r.submit("a", [*prefix, 30], max_tokens=9, priority=1),
    )
    planned = r.turn(r.result(), r.submit("now", [3] * 7, max_tokens=1))
    assert planned.turn.preempts == [2] and [a.rid for a in planned.turn.admits] == [3, 4]
    assert launch(planned) == ([1], [3, 4])
    r.run()
    assert not r.planner.requests.by_key and r.counts[2] == 0


def test_a_freed_seat_is_seen_though_as_many_blocks_are_there_as_before(rig: Rigs) -> None:
    r = rig(blocks=15, max_running=3)
    r.turn(
        r.submit("a", [1] * 4, max_tokens=9),
        r.submit("d", [2] * 3, max_tokens=9),
        r.submit("b", [3] * 2, max_tokens=2),
    )
    assert r.turn(r.submit("c", [4] * 3), r.result()).turn.admits == []  # no seat; a takes a block
    planned = r.turn(r.result())  # b brings one back, d is to take it
    assert [e.uid for e in planned.outputs.ended] == ["b"] and len(planned.turn.admits) == 1


def test_rows_are_held_back_where_a_transfer_has_the_blocks(rig: Rigs) -> None:
    r = rig(blocks=3)
    r.turn(r.submit("a", 8, max_tokens=9))
    for replica in (r.replica, r.follower):
        replica.ledger.blocks.acquire_unordered(("transfer", 1), 1, 0)
    planned = r.turn(r.result())
    assert planned.turn.launch is None and planned.turn.preempts == []
    assert r.maybe() is None
    for replica in (r.replica, r.follower):
        replica.ledger.drop(("transfer", 1))
    assert launch(r.turn()) == ([1], [])


def test_the_youngest_are_held_back(rig: Rigs) -> None:
    r = rig(blocks=5, policy="llamacpp")
    r.turn(r.submit("a", [1] * 4, max_tokens=2), r.submit("b", [2] * 4, max_tokens=2))
    for replica in (r.replica, r.follower):
        replica.ledger.blocks.acquire_unordered(("transfer", 1), 2, 0)
    assert launch(r.turn(r.result())) == ([1], [])


def test_a_policy_that_never_preempts_yields_to_nobody_either(rig: Rigs) -> None:
    r = rig(max_running=1, policy="llamacpp")
    r.turn(r.submit("a", priority=1))
    assert r.turn(r.result(), r.submit("now")).turn.preempts == []


@pytest.mark.parametrize("priority", [1, 0])
def test_eviction_for_many_preempted_at_once_is_the_same_on_followers(
    rig: Rigs, priority: int
) -> None:
    r = rig(blocks=8, policy="sglang")
    r.turn(r.submit("warm", [9] * 5, max_tokens=1))
    r.turn(r.result())
    r.turn(*[r.submit(f"r{i}", [i + 1] * 4, max_tokens=3, priority=1) for i in range(4)])
    for replica in (r.replica, r.follower):
        pool = replica.ledger.blocks
        pool.acquire_unordered(("transfer", 1), pool.free, replica.processed)
    planned = r.turn(r.result(), r.submit("now", [8] * 12, priority=priority))
    # A more important one would have to push others out after the eviction: it waits a turn.
    assert len(planned.turn.preempts) == 2 and planned.turn.evicts > 0
    assert planned.turn.admits == []


# --- preempted in flight -------------------------------------------------------------------


def test_a_first_token_that_was_in_flight_meets_its_deadline(rig: Rigs) -> None:
    r = rig(blocks=3, stages=2, window=2)
    r.turn(r.submit("a", [1] * 4, max_tokens=9))
    r.turn(r.submit("b", [2] * 5, max_tokens=9, deadlines=Deadlines(first_token=1.0)))
    assert r.turn(r.result()).turn.preempts == [2]
    assert r.turn(r.result()).outputs.keys == [2]
    r.now += 5.0
    assert r.planner.next_timer() is None
    assert not [e for p in r.run() for e in p.outputs.ended if e.reason.value != "length"]


def test_rows_of_a_preempted_request_run_on_and_those_of_a_stopped_one_may_leave(
    rig: Rigs,
) -> None:
    r = rig(blocks=3, stages=2, window=2)
    a = r.turn(r.submit("a", [1] * 4, max_tokens=9)).work.rows[0]
    b = r.turn(r.submit("b", [2] * 5, max_tokens=9)).work.rows[0]
    assert r.turn(r.result()).turn.preempts == [2]
    assert b.pulse.beats and a.pulse.beats
    r.turn(r.stop("s", "a"))
    assert not a.pulse.beats


# --- forks ---------------------------------------------------------------------------------


def test_siblings_wait_for_the_prompt_and_fork_it(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", 6, choices=3), r.submit("b", [9] * 4))
    planned = r.turn(r.result())
    assert [(a.rid, a.fork) for a in planned.turn.admits] == [(3, 1), (4, 1)]
    assert [len(row.tokens) for row in planned.work.rows] == [1, 1, 1, 1]
    source = r.replica.seqs[1].blocks
    forks = [r.replica.seqs[rid].blocks for rid in (3, 4)]
    assert [blocks[0] for blocks in forks] == [source[0]] * 2  # full: shared
    assert planned.work.copies == [(source[1], blocks[1]) for blocks in forks]


def test_an_heir_takes_the_place_of_the_first_in_the_queue(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("x"), r.submit("a", choices=2), r.submit("b"))
    r.turn(r.stop("s", "a.0"))
    head = r.planner.schedule.waiting.head()
    assert head is not None and head.uid == "a.1"
    r.turn(r.submit("c", priority=-1), r.stop("t", "x"))
    assert r.planner.schedule.waiting.head(started=True) is None  # it has not started


def test_if_the_first_ends_in_its_prefill_another_goes_first(rig: Rigs) -> None:
    r = rig(max_batch_tokens=4)
    r.turn(r.submit("a", 9, choices=3))
    planned = r.turn(r.stop("s", "a.0"), r.result())
    assert [(a.fork, len(a.tokens)) for a in planned.turn.admits] == [(0, 9)]
    r.turn(r.stop("t", "a.2"))
    assert [e.uid for p in r.run() for e in p.outputs.ended] == ["a"]
    assert not r.planner.schedule._siblings and not r.planner.schedule._first


def test_a_marked_request_is_not_admitted_any_more(rig: Rigs) -> None:
    r = rig(policy="deepinfer", max_running=2)
    r.turn(r.submit("a", 6, choices=2, max_tokens=9))
    planned = r.turn(r.result(), r.stop("s", "a.1"))  # it might fork, and would launch nothing
    assert planned.turn.admits == []
    assert [e.index for e in r.turn().outputs.ended] == [1]


def test_who_yields_frees_nothing_that_the_other_one_shares(rig: Rigs) -> None:
    """What the victim's blocks have is what the important one starts with: they stay in use."""
    r = rig(blocks=6)
    r.turn(
        r.submit("o", [50 + i for i in range(8)], max_tokens=9),
        r.submit("v", 8, priority=1, max_tokens=9),
    )
    planned = r.turn(r.result(), r.submit("c", 13, priority=-1, max_tokens=1))
    assert planned.turn.preempts == [2] and planned.turn.launch.decode == [1]
    r.run()
    assert not r.planner.requests.by_key
