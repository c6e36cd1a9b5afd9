"""Stops in the planner: where they find a request, who may send them, what they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stopway_core.events import DrainStarted, Hit, LeaseLost
from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines, Outcome, Reason, Target

if TYPE_CHECKING:
    from .conftest import Rig

    Rigs = Callable[..., Rig]


def ends(planned: object) -> list[tuple[str, str, int, int]]:
    return [
        (e.uid, e.reason.value, e.keep, e.discarded_tokens)
        for e in planned.outputs.ended  # type: ignore[attr-defined]
    ]


def test_a_stop_in_the_turn_of_the_finishing_result_finds_it_finished(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=1))
    planned = r.turn(r.stop("s", "a"), r.result(7))
    assert ends(planned) == [("a", "length", 1, 0)]
    receipt = r.receipts.get("s")
    assert receipt.status == "already_finished" and receipt.outcomes == {"finished": 1}
    assert planned.turn.stops[0].rids == []


def test_a_token_of_the_same_turn_is_delivered_before_the_stop(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9))
    planned = r.turn(r.stop("s", "a"), r.result(7))
    assert planned.outputs.tokens == [7]
    assert ends(planned) == [("a", "client_cancel", 1, 0)]
    assert planned.turn.launch is None and r.counts == (15, 1, 0)


def test_what_is_in_flight_is_discarded_and_counted(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result(7))
    seq = r.replica.seqs[1]
    planned = r.turn(r.stop("s", "a"))
    assert ends(planned) == [("a", "client_cancel", 1, 1)]
    assert planned.stops[0].drain_step == 2
    assert r.receipts.get("s").tokens_discarded == 1
    late = r.turn(r.result(8))  # its step completes: nobody gets the token
    assert late.outputs.empty and late.turn.ends == []
    assert seq.tokens == [1, 2, 3, 4, 7]  # an exec thread may still read it: it is left alone


def test_a_stop_finds_a_request_that_waits(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("a"), r.submit("b"))
    planned = r.turn(r.stop("s", "b"))
    assert ends(planned) == [("b", "client_cancel", 0, 0)]
    assert planned.turn.ends == [] and planned.turn.stops[0].rids == []
    assert r.planner.waiting == 0 and r.planner.running == 1


def test_a_cancel_survives_a_preemption(rig: Rigs) -> None:
    r = rig(blocks=3, max_running=2)
    r.turn(r.submit("a", [1] * 4, max_tokens=8), r.submit("b", [2] * 4, max_tokens=8))
    planned = r.turn(r.result(7, 7))
    assert planned.turn.preempts == [2]  # two need a block, one is left
    planned = r.turn(r.stop("s", "b"))
    assert ends(planned) == [("b", "client_cancel", 1, 0)]
    assert planned.outputs.ended[0].preemptions == 1
    r.run()
    assert sum(r.counts[:2]) == 3


@pytest.mark.parametrize(("delivers", "discarded"), [(True, 0), (False, 1)])
def test_a_token_in_flight_at_a_preemption_is_delivered_or_counted(
    rig: Rigs, delivers: bool, discarded: int
) -> None:
    policy = replace(POLICIES["vllm"], delivers_preempted=delivers)
    r = rig(blocks=3, stages=2, window=2, policy=policy)
    r.turn(r.submit("a", [1] * 4, max_tokens=3))
    r.turn(r.submit("b", [2] * 5, max_tokens=3))
    planned = r.turn(r.result(skip=0))  # a needs a block; b, in flight, has the only others
    assert planned.turn.preempts == [2]
    (ended,) = [e for p in r.run() for e in p.outputs.ended if e.uid == "b"]
    assert (ended.keep, ended.discarded_tokens, ended.preemptions) == (3, discarded, 1)


def test_a_stop_before_its_request(rig: Rigs) -> None:
    r = rig()
    first = r.turn(r.stop("s", "a"))
    assert first.turn.stops[0].rids == [] and r.receipts.get("s").outcomes == {"unknown": 1}
    planned = r.turn(r.submit("a"))
    assert [a.uid for a in planned.outputs.accepted] == ["a"]
    assert ends(planned) == [("a", "client_cancel", 0, 0)]
    assert planned.turn.stops[0].stop_id == "s" and planned.turn.launch is None
    receipt = r.receipts.get("s")
    assert (receipt.count, receipt.outcomes) == (1, {"unknown": 0, "stopped": 1})
    assert receipt.turn_effective == 2


def test_a_stop_and_its_request_in_one_turn_in_either_order(rig: Rigs) -> None:
    for order in (0, 1):
        r = rig()
        batch = [r.stop("s", "a"), r.submit("a")]
        planned = r.turn(*(batch[::-1] if order else batch))
        assert ends(planned) == [("a", "client_cancel", 0, 0)]


def test_a_tombstone_is_forgotten_after_twice_the_age_of_an_attempt(rig: Rigs) -> None:
    r = rig(submit_age_s=30.0)
    r.turn(r.stop("s", "a"))
    r.now += 60.0
    r.maybe()
    assert ends(r.turn(r.submit("a", minted_at=r.now))) == []


def test_nobody_displaces_the_tombstone_of_another_tenant(rig: Rigs) -> None:
    r = rig()
    r.turn(r.stop("s1", "a"))
    r.turn(r.stop("s2", "a", tenant="evil"))
    assert ends(r.turn(r.submit("a"))) == [("a", "client_cancel", 0, 0)]
    assert ends(r.turn(r.submit("b"), r.stop("s3", "b", tenant="evil"))) == []


def test_an_attempt_minted_too_long_ago_is_refused(rig: Rigs) -> None:
    r = rig(submit_age_s=30.0)
    r.now = 1030.5
    (refused,) = r.turn(r.submit("a")).outputs.refused
    assert (refused.status, refused.code) == (503, "attempt_expired")
    r.now = 1029.0
    assert r.turn(r.submit("a")).outputs.accepted


def test_the_same_stop_again_changes_nothing_but_is_answered(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a"))
    r.turn(r.stop("s", "a"))
    r.receipts.changed()
    assert r.maybe(r.stop("s", "a")) is None
    assert [x["stop_id"] for x in r.receipts.changed()] == ["s"]


def test_a_later_stop_of_the_same_request_is_a_new_one(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a"))
    planned = r.turn(r.stop("s1", "a"), r.stop("s2", "a"))
    assert [(s.stop_id, len(s.rids)) for s in planned.turn.stops] == [("s1", 1), ("s2", 0)]
    assert r.receipts.get("s2").status == "already_finished"


@pytest.mark.parametrize("again", [0, 1])
def test_a_request_is_accepted_once(rig: Rigs, again: int) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=1))
    if again:
        r.turn(r.result())
    planned = r.turn(r.submit("a"))
    assert [(x.status, x.code) for x in planned.outputs.refused] == [(409, "duplicate")]
    assert not planned.outputs.accepted


def test_a_request_is_no_other_ones_choice(rig: Rigs) -> None:
    r = rig()
    planned = r.turn(r.submit("a.1"), r.submit("a", choices=2))
    assert [x.code for x in planned.outputs.refused] == ["duplicate"]


def test_another_tenants_request_is_unknown(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a"))
    assert ends(r.turn(r.stop("s1", "a", tenant="evil"))) == []
    assert r.receipts.get("s1").outcomes == {"unknown": 1}
    planned = r.turn(r.stop("s2", "a", tenant="ops", admin=True, reason=Reason.ADMIN))
    assert ends(planned) == [("a", "admin", 0, 1)]


def test_selectors_take_all_that_they_cover_at_one_turn(rig: Rigs) -> None:
    r = rig(max_running=2)
    for uid, tenant, conversation in (("a", "t", "c"), ("b", "t", "d"), ("c", "u", "c")):
        r.turn(r.submit(uid, tenant=tenant, conversation=conversation))
    planned = r.turn(r.stop("s1", target=Target(conversation="c")))
    assert [e[0] for e in ends(planned)] == ["a"]
    planned = r.turn(r.stop("s2", target=Target(everything=True), tenant="x", admin=True))
    assert [e[0] for e in ends(planned)] == ["b", "c"]
    r.run()
    assert r.counts[2] == 0


def test_a_selector_covers_what_came_before_it_in_the_same_batch_only(rig: Rigs) -> None:
    r = rig()
    planned = r.turn(
        r.submit("a", conversation="c"),
        r.stop("s", target=Target(conversation="c")),
        r.submit("b", conversation="c"),
    )
    assert [e[0] for e in ends(planned)] == ["a"]
    assert r.receipts.get("s").outcomes == {"stopped": 1}
    assert "b" in r.planner.requests


def test_a_late_selector_finds_nothing_that_its_own_gateway_took_after_it(rig: Rigs) -> None:
    """By one clock it is known what came first; by two, only roughly."""
    r = rig()
    for uid, at in (("req-1-gw0-1", 999.0), ("req-2-gw0-2", 1001.0), ("req-3-gw1-3", 1001.0)):
        r.turn(r.submit(uid, conversation="c", minted_at=at))
    stop = r.stop("s", target=Target(conversation="c"), publisher="gw0-1f")
    assert [e[0] for e in ends(r.turn(stop))] == ["req-1-gw0-1", "req-3-gw1-3"]


def test_a_lost_lease_stops_what_came_on_it(rig: Rigs) -> None:
    r = rig(max_running=2)
    r.turn(r.submit("a", gateway="g1"), r.submit("b", gateway="g2"), r.submit("c", gateway="g1"))
    planned = r.turn(r.submit("d", gateway="g1"), LeaseLost("g1"), r.submit("e", gateway="g1"))
    assert [(e[0], e[1]) for e in ends(planned)] == [
        ("a", "client_disconnect"),
        ("c", "client_disconnect"),
        ("d", "client_disconnect"),
    ]
    assert "b" in r.planner.requests and "e" in r.planner.requests


def test_a_stop_of_a_parent_takes_all_its_choices(rig: Rigs) -> None:
    r = rig(max_running=2)
    r.turn(r.submit("a", choices=4))
    r.turn(r.result())  # the first has its prompt; one of the others is admitted
    assert (r.planner.running, r.planner.waiting) == (2, 2)
    planned = r.turn(r.stop("s", "a"))
    assert [e[0] for e in ends(planned)] == ["a"] * 4
    receipt = r.receipts.get("s")
    assert receipt.uids == ["a.0", "a.1", "a.2", "a.3"] and receipt.outcomes == {"stopped": 4}
    assert r.planner.waiting == 0 and not r.planner.requests.by_key


def test_a_stop_of_one_choice_leaves_the_others(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", choices=3))
    r.turn(r.stop("s", "a.1"))
    assert [c.uid for c in r.planner.requests.live("a")] == ["a.0", "a.2"]


def test_a_stop_of_one_choice_may_come_before_it(rig: Rigs) -> None:
    r = rig()
    r.turn(r.stop("s", "a.1"))
    planned = r.turn(r.submit("a", choices=3))
    assert [(e.index, e.reason) for e in planned.outputs.ended] == [(1, Reason.CLIENT_CANCEL)]
    r.turn(r.result())
    assert r.planner.running == 2


def test_a_request_and_its_choice_named_together_are_counted_right(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", choices=2))
    r.turn(r.stop("s", "a", "a.0", "nobody"))
    receipt = r.receipts.get("s")
    assert receipt.count == sum(receipt.outcomes.values()) == 3
    assert receipt.outcomes == {"stopped": 2, "unknown": 1} and receipt.already == 0
    assert receipt.uids == ["a.0", "a.1", "nobody"]


# --- stop strings, eos, min_tokens ---------------------------------------------------------


def test_a_hit_cuts_what_was_sampled_beyond_it(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result(7))
    r.turn(r.result(8))
    planned = r.turn(r.result(9), Hit(1, 1))
    assert ends(planned) == [("a", "stop_string", 1, 2)]
    assert planned.outputs.ended[0].outcome is Outcome.FINISHED
    assert r.maybe(Hit(1, 1)) is None  # twice, and after the end


def test_a_stop_in_the_turn_of_a_hit_wins(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result(7))
    planned = r.turn(Hit(1, 1), r.stop("s", "a"))
    assert [e[1] for e in ends(planned)] == ["client_cancel"]


def test_a_hit_keeps_no_more_than_there_is(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9))
    assert ends(r.turn(r.result(7), Hit(1, 5))) == [("a", "stop_string", 1, 0)]


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason"),
    [
        ({}, [5, 0], 2, "eos"),
        ({"ignore_eos": True}, [5, 0, 6], 3, "length"),
        ({"ignore_eos": True, "stop_token_ids": (6,)}, [0, 6], 2, "eos"),
        ({"stop_token_ids": (6,)}, [6], 1, "eos"),
        ({"min_tokens": 2}, [0, 0], 2, "eos"),
        ({"min_tokens": 3}, [0, 0, 0], 3, "eos"),
        ({"max_tokens": 1}, [0], 1, "eos"),
        ({"max_tokens": 2, "min_tokens": 3}, [0, 0], 2, "length"),
    ],
)
def test_how_an_answer_ends(
    rig: Rigs, params: dict[str, object], tokens: list[int], kept: int, reason: str
) -> None:
    r = rig()
    r.turn(r.submit("a", **{"max_tokens": 3, **params}))
    for token in tokens[:-1]:
        assert not r.turn(r.result(token)).outputs.ended
    assert ends(r.turn(r.result(tokens[-1]))) == [("a", reason, kept, 0)]


# --- time ----------------------------------------------------------------------------------


def test_the_three_deadlines(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(
        r.submit("a", deadlines=Deadlines(queue=1.0, first_token=2.0, total=5.0), max_tokens=99),
        r.submit("b", deadlines=Deadlines(queue=1.0)),
        r.submit("c", deadlines=Deadlines(first_token=2.0)),
    )
    assert r.planner.next_timer() == 1001.0
    r.now = 1001.0
    assert ends(r.turn()) == [("b", "deadline_queue", 0, 0)]
    assert r.planner.next_timer() == 1002.0
    r.turn(r.result())  # a has its first token in time
    r.now = 1002.0
    assert ends(r.turn()) == [("c", "deadline_ttft", 0, 0)]
    r.now = 1005.0
    assert ends(r.turn()) == [("a", "deadline_total", 1, 1)]
    assert r.planner.next_timer() is None


def test_a_result_of_the_turn_of_a_deadline_comes_first(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", deadlines=Deadlines(total=1.0), max_tokens=1))
    r.now += 5.0
    assert ends(r.turn(r.result())) == [("a", "length", 1, 0)]


def test_who_has_left_the_queue_wakes_nobody_for_its_deadline(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", deadlines=Deadlines(queue=1.0)))
    assert r.planner.next_timer() is None


def test_the_first_token_deadline_holds_through_a_long_prefill(rig: Rigs) -> None:
    r = rig(max_batch_tokens=4)
    r.turn(r.submit("a", 12, deadlines=Deadlines(queue=1.0, first_token=2.0)))
    r.turn(r.result())
    r.now += 2.0
    assert ends(r.turn()) == [("a", "deadline_ttft", 0, 0)]


def test_deadlines_fire_though_nothing_can_be_scheduled(rig: Rigs) -> None:
    r = rig(blocks=2)
    r.turn(r.submit("a", 7, max_tokens=1), r.submit("b", 7, deadlines=Deadlines(queue=1.0)))
    r.now += 1.0
    assert ends(r.turn()) == [("b", "deadline_queue", 0, 0)]


def test_a_drain_takes_no_more_and_stops_what_is_left_in_the_end(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("a", max_tokens=1), r.submit("b", max_tokens=50))
    planned = r.turn(DrainStarted(1010.0), r.submit("c"), r.result())
    assert [x.code for x in planned.outputs.refused] == ["drain"]
    assert ends(planned) == [("a", "length", 1, 0)]
    assert [a.rid for a in planned.turn.admits] == [2]  # what waits is still served
    assert not r.planner.drained and r.planner.next_timer() == 1010.0
    r.now = 1010.0
    assert ends(r.turn()) == [("b", "drain", 0, 1)]
    assert not r.planner.drained  # a step is in flight
    r.turn(r.result())
    assert not r.planner.drained  # a rank may still be in it
    r.receipts.progress(0, r.replica.turn, r.now, r.replica.step, r.now)
    assert r.planner.drained and r.planner.next_timer() is None


def test_a_drain_waits_until_every_rank_has_applied_every_stop(rig: Rigs) -> None:
    """One that matched nobody waits for no step, and is proved by its turn alone."""
    r = rig(ranks=2)
    r.turn(r.submit("a", max_tokens=1))
    r.turn(r.result())
    step = r.replica.step
    assert step > 0
    for rank in (0, 1):
        r.receipts.progress(rank, r.replica.turn, r.now, step, r.now)
    r.turn(DrainStarted(r.now + 10), r.stop("s", "nobody"))
    r.receipts.progress(0, r.replica.turn, r.now, step, r.now)
    assert not r.planner.drained
    r.receipts.progress(1, r.replica.turn, r.now, step, r.now)
    assert r.planner.drained and r.receipts.get("s").status == "reclaimed"


def test_a_drain_waits_until_every_rank_has_run_the_last_step(rig: Rigs) -> None:
    """The result of the last step comes from one rank; the other is still in that step."""
    r = rig(ranks=2)
    r.turn(r.submit("a", max_tokens=50))
    assert ends(r.turn(DrainStarted(r.now))) == [("a", "drain", 0, 1)]
    r.turn(r.result())
    step, turn = r.replica.step, r.replica.turn
    r.receipts.progress(0, turn, r.now, step, r.now)
    r.receipts.progress(1, turn, r.now, step - 1, r.now)
    assert not r.planner.drained
    r.receipts.progress(1, turn, r.now, step, r.now)
    assert r.planner.drained


def test_an_idle_group_is_drained_at_once(rig: Rigs) -> None:
    r = rig()
    assert r.maybe(DrainStarted(1.0)) is None and r.planner.drained
