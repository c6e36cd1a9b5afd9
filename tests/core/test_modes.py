"""A group that is paused, and what a service sets for all its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from stopway_core.admission import tightest
from stopway_core.events import Compiled, DrainStarted, LeaseLost, Mode, ModeChanged
from stopway_core.types import Deadlines, Target

if TYPE_CHECKING:
    from .conftest import Rig

    Rigs = Callable[..., Rig]


def ends(planned: object) -> list[tuple[str, str]]:
    return [(e.uid, e.reason.value) for e in planned.outputs.ended]  # type: ignore[attr-defined]


def test_a_frozen_group_launches_nothing_and_keeps_what_it_holds(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9))
    planned = r.turn(ModeChanged(Mode.FROZEN), r.result())
    assert planned.outputs.tokens == [7] and planned.turn.launch is None
    assert r.turn(r.submit("b")).turn.admits == [] and r.counts == (15, 0, 1)
    planned = r.turn(ModeChanged(Mode.RUNNING))
    assert planned.turn.launch.decode == [1] and len(planned.turn.admits) == 1


def test_a_stop_and_a_deadline_find_who_is_frozen(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", max_tokens=9), r.submit("b", deadlines=Deadlines(total=1.0)))
    r.turn(ModeChanged(Mode.FROZEN), r.result())
    assert ends(r.turn(r.stop("s", "a"))) == [("a", "client_cancel")]
    r.now += 1.0
    assert ends(r.turn()) == [("b", "deadline_total")]
    assert r.counts[2] == 0


@pytest.mark.parametrize("policy", ["sglang", "tensorrt-llm", "deepinfer"])
def test_a_stop_waits_for_no_step_where_none_will_come(rig: Rigs, policy: str) -> None:
    r = rig(policy=policy)
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result(), ModeChanged(Mode.FROZEN))
    assert ends(r.turn(r.stop("s", "a"))) == [("a", "client_cancel")]


@pytest.mark.parametrize("mode", [Mode.WAITING, Mode.ABORTED])
def test_a_stop_waits_for_no_admission_where_the_queue_stands(rig: Rigs, mode: Mode) -> None:
    r = rig(policy="sglang")  # who waits for a grammar ends by a prefill of one token
    r.turn(ModeChanged(mode), r.submit("a", grammar="g"))
    r.turn(r.stop("s", "a"))
    assert r.receipts.get("s").marked == 0 and r.planner.waiting == 0
    r.turn(ModeChanged(Mode.RUNNING), r.submit("b", grammar="h"))
    r.turn(r.stop("t", "b"), ModeChanged(mode))
    assert r.receipts.get("t").marked == 0 and r.planner.waiting == 0


def test_waiting_those_who_started_run_on_and_the_queue_stands(rig: Rigs) -> None:
    r = rig(blocks=3, max_running=3)
    r.turn(r.submit("a", [1] * 4, max_tokens=4), r.submit("b", [2] * 4, max_tokens=4))
    planned = r.turn(ModeChanged(Mode.WAITING), r.submit("c"), r.result(7, 7))
    assert planned.turn.preempts == [2]
    done = [e.uid for p in r.run() for e in p.outputs.ended]
    assert done == ["a", "b"] and r.planner.waiting == 1  # b had started
    assert len(r.turn(ModeChanged(Mode.RUNNING)).turn.admits) == 1


def test_waiting_choices_of_a_request_that_runs_have_started(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", choices=2, max_tokens=2))
    r.turn(ModeChanged(Mode.WAITING), r.submit("b"), r.result())
    assert r.planner.running == 2 and r.planner.waiting == 1


def test_aborting_ends_all_and_the_queue_stands(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("a"), r.submit("b"), r.submit("c", grammar="g"))
    planned = r.turn(ModeChanged(Mode.ABORTED), r.submit("d"))
    assert ends(planned) == [("a", "admin"), ("b", "admin"), ("c", "admin")]
    assert [a.uid for a in planned.outputs.accepted] == ["d"] and planned.turn.admits == []
    r.turn(r.result())
    assert len(r.turn(ModeChanged(Mode.RUNNING)).turn.admits) == 1


def test_draining_serves_all_and_takes_nothing_new_until_it_is_resumed(rig: Rigs) -> None:
    r = rig(max_running=1)
    r.turn(r.submit("a", max_tokens=1), r.submit("b", max_tokens=1))
    planned = r.turn(ModeChanged(Mode.DRAINING), r.submit("c"), r.result())
    assert [x.code for x in planned.outputs.refused] == ["drain"]
    assert len(planned.turn.admits) == 1 and not r.planner.drained  # it does not leave
    assert r.turn(ModeChanged(Mode.RUNNING), r.submit("d"), r.result()).outputs.accepted


def test_a_request_that_is_sent_again_is_not_told_that_it_was_refused(rig: Rigs) -> None:
    r = rig(submit_age_s=5.0)
    r.turn(r.submit("a", max_tokens=9))
    planned = r.turn(DrainStarted(2000.0), r.submit("a"))
    assert [x.code for x in planned.outputs.refused] == ["duplicate"]
    r.now += 9.0  # this attempt is too old as well
    assert [x.code for x in r.turn(r.submit("a")).outputs.refused] == ["duplicate"]


# --- the service's deadlines ---------------------------------------------------------------


def test_the_tighter_deadline_holds() -> None:
    none, service = Deadlines(), Deadlines(queue=1.0, total=9.0)
    assert tightest(none, none) == none and tightest(none, service) == service
    asked = Deadlines(queue=2.0, first_token=3.0, total=4.0)
    assert tightest(asked, service) == Deadlines(queue=1.0, first_token=3.0, total=4.0)


def test_a_service_deadline_ends_who_asked_for_none(rig: Rigs) -> None:
    r = rig(max_running=1, deadlines=Deadlines(queue=1.0, total=3.0))
    r.turn(r.submit("a", max_tokens=99), r.submit("b", deadlines=Deadlines(queue=0.5)))
    assert r.planner.next_timer() == 1000.5
    r.now += 0.5
    assert ends(r.turn(r.submit("c"))) == [("b", "deadline_queue")]
    r.now += 1.0
    assert ends(r.turn()) == [("c", "deadline_queue")]
    r.now = 1003.0
    assert ends(r.turn()) == [("a", "deadline_total")]


# --- marks ---------------------------------------------------------------------------------


def test_a_receipt_waits_for_what_its_policy_has_yet_to_end(rig: Rigs) -> None:
    r = rig(policy="tensorrt-llm")
    r.turn(r.submit("a", max_tokens=9), r.submit("b", max_tokens=9))
    r.turn(r.stop("s", "a", "b"))
    receipt = r.receipts.get("s")
    r.receipts.progress(0, 2, 1.0, 0, 1.0)
    assert (receipt.marked, receipt.status.value) == (2, "noticed")
    assert r.receipts.pending_on(receipt)[0].startswith("2 requests")
    planned = r.turn(r.result())
    assert [stop.rids for stop in planned.turn.stops] == [[1, 2]] and receipt.marked == 0
    r.receipts.progress(0, 3, 2.0, 1, 2.0)
    assert receipt.status.value == "reclaimed" and receipt.outcomes == {"stopped": 2}


def test_a_marked_request_that_ends_otherwise_was_stopped(rig: Rigs) -> None:
    r = rig(policy="tensorrt-llm")
    r.turn(r.submit("a", max_tokens=1))
    r.turn(r.stop("s", "a"), r.stop("t", "a"))
    planned = r.turn(r.result())
    assert ends(planned) == [("a", "client_cancel")]
    assert [(stop.stop_id, stop.rids) for stop in planned.turn.stops] == [("s", [1]), ("t", [1])]


def test_behind_the_requests_that_came_before_it_and_before_those_that_came_after(
    rig: Rigs,
) -> None:
    for policy in ("native", "sglang"):
        r = rig(policy=policy)
        planned = r.turn(
            r.submit("a", gateway="g", conversation="c"),
            LeaseLost("g"),
            r.submit("b", gateway="g", conversation="c"),
            r.stop("s", target=Target(conversation="c")),
            r.submit("d", gateway="g", conversation="c"),
        )
        assert [e.uid for e in planned.outputs.ended] == ["a", "b"] and r.planner.running == 1


def test_of_who_waits_for_a_grammar_one_token_is_computed_and_the_others_get_theirs(
    rig: Rigs,
) -> None:
    r = rig(policy="sglang")
    r.turn(r.submit("a", 9, grammar="g"), r.submit("b", 9, grammar="g"))
    planned = r.turn(r.stop("s", "a"))
    assert [(len(a.tokens), a.grammar) for a in planned.turn.admits] == [(1, 0)]
    planned = r.turn(Compiled(1), r.result(5))
    (ended,) = planned.outputs.ended
    assert (ended.uid, ended.keep, ended.discarded_tokens, ended.prompt_tokens) == ("a", 0, 1, 9)
    assert [a.grammar for a in planned.turn.admits] == [1]
