"""Grammars: compiled once for all who want them, in few slots; a stop finds who waits for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from stopway_core.events import Compiled
from stopway_core.ledger import GRAMMARS
from stopway_core.types import DROPPED, REJECTED, Reason

if TYPE_CHECKING:
    from .conftest import Rig

    Rigs = Callable[..., Rig]


def ends(planned: object) -> list[tuple[str, str]]:
    return [(e.uid, e.reason.value) for e in planned.outputs.ended]  # type: ignore[attr-defined]


def slots(r: Rig) -> tuple[int, int, int]:
    pool = r.replica.ledger.pools[GRAMMARS]
    return pool.free, pool.idle, pool.held


def test_one_compilation_for_all_who_ask_and_a_cached_one_afterwards(rig: Rigs) -> None:
    r = rig()
    planned = r.turn(r.submit("a", grammar="g"), r.submit("b", grammar="g", max_tokens=1))
    assert [(c.slot, c.text) for c in planned.turn.compiles] == [(1, "g")]
    assert r.planner.waiting == 2 and planned.turn.launch is None and slots(r) == (3, 0, 1)
    planned = r.turn(Compiled(1))
    assert planned.turn.compiled == [1] and [a.grammar for a in planned.turn.admits] == [1, 1]
    assert [row.grammar for row in planned.work.rows] == [1, 1]
    r.run(token=r.EOS)
    assert slots(r) == (3, 1, 0)
    planned = r.turn(r.submit("c", grammar="g", max_tokens=1))
    assert not planned.turn.compiles and planned.turn.admits[0].grammar == 1


def test_a_token_that_ends_it_is_the_grammars_end_even_where_eos_is_ignored(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", grammar="g", ignore_eos=True, min_tokens=5, max_tokens=9))
    r.turn(Compiled(1))
    assert ends(r.turn(r.result(r.EOS))) == [("a", "grammar_end")]


def test_one_that_cannot_be_compiled_ends_all_who_wait_for_it_and_is_tried_anew(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", grammar="g", choices=2), r.submit("b"))
    planned = r.turn(Compiled(1, "line 1: no"))
    assert ends(planned) == [("a", "bad_input")] * 2 and planned.turn.forgets == [1]
    assert "line 1: no" in planned.outputs.ended[0].message and slots(r) == (4, 0, 0)
    assert r.turn(r.submit("c", grammar="g")).turn.compiles


def test_more_grammars_than_slots_wait_in_the_order_of_asking(rig: Rigs) -> None:
    r = rig(grammars=1)
    planned = r.turn(*[r.submit(f"r{i}", grammar=f"g{i}", max_tokens=1) for i in range(3)])
    assert [c.text for c in planned.turn.compiles] == ["g0"]
    assert not r.turn(Compiled(1)).turn.compiles  # r0 has it still
    planned = r.turn(r.result())
    assert planned.turn.forgets == [1] and [c.text for c in planned.turn.compiles] == ["g1"]
    r.turn(r.stop("s", "r2"))
    r.turn(Compiled(1))
    assert not r.turn(r.result()).turn.compiles  # nobody wants g2 any more
    assert slots(r) == (0, 1, 0)


def test_a_stop_finds_who_waits_for_a_grammar_and_the_compilation_goes_on(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", grammar="g"))
    assert ends(r.turn(r.stop("s", "a"))) == [("a", "client_cancel")]
    assert slots(r) == (3, 0, 1)  # held until the rank that samples has reported
    r.turn(Compiled(1))
    assert slots(r) == (3, 1, 0) and not r.planner.requests.by_key


def test_choices_of_which_one_was_stopped_meanwhile_are_queued_together(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", grammar="g", choices=3))
    r.turn(r.stop("s", "a.0"))
    planned = r.turn(Compiled(1))
    assert len(planned.turn.admits) == 1  # the others follow when it has the prompt
    planned = r.turn(r.result())
    assert [a.fork for a in planned.turn.admits] == [1]


def test_one_that_runs_is_never_forgotten(rig: Rigs) -> None:
    r = rig(grammars=1)
    r.turn(r.submit("a", grammar="g", max_tokens=9), r.submit("b", grammar="h"))
    r.turn(Compiled(1))
    planned = r.turn(r.result(), r.submit("c", grammar="g"))
    assert not planned.turn.forgets and planned.turn.admits[0].grammar == 1


def test_a_rejection_ends_it_with_what_it_has(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", grammar="g", max_tokens=9))
    r.turn(Compiled(1))
    r.turn(r.result(5))
    planned = r.turn(r.result(REJECTED))
    (ended,) = planned.outputs.ended
    assert (ended.reason, ended.keep, ended.discarded_tokens) == (Reason.BAD_INPUT, 1, 0)
    assert "grammar" in ended.message and planned.outputs.tokens == []


def test_a_rejection_and_what_was_launched_after_it_may_come_in_one_turn(rig: Rigs) -> None:
    r = rig(window=2)
    r.turn(r.submit("a", grammar="g", max_tokens=9))
    r.turn(Compiled(1))
    r.turn(r.result(5))
    r.turn()
    planned = r.turn(r.result(REJECTED), r.result(DROPPED, skip=1))
    (ended,) = planned.outputs.ended
    assert (ended.reason, ended.keep, ended.discarded_tokens) == (Reason.BAD_INPUT, 1, 0)
    assert r.counts[2] == 0


def test_drafts_that_were_right_before_a_rejection_are_delivered(rig: Rigs) -> None:
    r = rig(draft_tokens=2, blocks=32)
    r.turn(r.submit("a", [1, 2, 3, 4, 5, 1, 2], grammar="g", max_tokens=9))
    r.turn(Compiled(1))
    planned = r.turn(r.result(3))
    assert planned.turn.launch.drafts == [[4, 5]]
    planned = r.turn(r.rows([4, REJECTED]))
    (ended,) = planned.outputs.ended
    assert planned.outputs.tokens == [4] and (ended.keep, ended.discarded_tokens) == (2, 0)
    assert (ended.drafted_tokens, ended.accepted_tokens) == (2, 1)
    assert (r.planner.drafted_tokens, r.planner.accepted_tokens) == (2, 1)


@pytest.mark.parametrize("order", [0, 1])
def test_forgetting_and_compiling_many_is_the_same_on_followers(rig: Rigs, order: int) -> None:
    r = rig(grammars=2)
    r.turn(r.submit("a", grammar="g", max_tokens=1), r.submit("b", grammar="h", max_tokens=1))
    r.turn(Compiled(1 + order), Compiled(2 - order))
    r.turn(r.result())
    planned = r.turn(r.submit("c", grammar="i"), r.submit("d", grammar="j"))
    assert [c.text for c in planned.turn.compiles] == ["i", "j"]
    assert sorted(planned.turn.forgets) == [1, 2]


def test_a_stop_token_of_the_clients_is_no_end_of_the_grammar(rig: Rigs) -> None:
    r = rig()
    r.turn(r.submit("a", grammar="g", stop_token_ids=(9,)), r.submit("b", grammar="g"))
    r.turn(Compiled(1))
    assert ends(r.turn(r.result(9, r.EOS))) == [("a", "eos"), ("b", "grammar_end")]


def test_slots_go_by_priority_and_to_the_tenants_in_turn(rig: Rigs) -> None:
    r = rig(grammars=8)
    taken = [r.submit(f"t{i}", grammar=f"t{i}", tenant="u") for i in range(6)]
    greedy = [r.submit(f"a{i}", grammar=f"a{i}", max_tokens=1) for i in range(2)]
    r.turn(*taken, *greedy)
    late = [r.submit(f"a{i}", grammar=f"a{i}") for i in (2, 3)]
    others = [r.submit("b0", grammar="b0", tenant="v"), r.submit("c0", grammar="c0", priority=-1)]
    assert r.turn(*late, *others[:1]).turn.compiles == []
    first = r.turn(Compiled(7, "no"), Compiled(8, "no"))
    assert [c.text for c in first.turn.compiles] == ["a2", "b0"]
    r.turn(*others[1:])
    assert [c.text for c in r.turn(Compiled(first.turn.compiles[0].slot, "no")).turn.compiles] == [
        "c0"
    ]


def test_one_tenant_leaves_slots_and_places_to_the_others(rig: Rigs) -> None:
    r = rig(grammars=8)
    planned = r.turn(*(r.submit(f"a{i}", grammar=f"a{i}") for i in range(9)))
    assert len(planned.turn.compiles) == 6
    assert [(e.uid, e.code, e.status) for e in planned.outputs.refused] == [
        ("a8", "grammars_full", 429)
    ]
    planned = r.turn(r.submit("b", grammar="b", tenant="u"), r.submit("c", grammar="a7"))
    assert [c.text for c in planned.turn.compiles] == ["b"] and not planned.outputs.refused
    r.turn(*(r.stop(f"s{i}", f"a{i}", "c") for i in range(9)))
    assert not r.planner._grammars._lines and list(r.planner._grammars._waiting) == []
