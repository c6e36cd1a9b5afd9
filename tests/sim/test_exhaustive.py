"""Two ranks, two requests, one stop: every order of everything."""

import pytest

from stopway_sim import Exhaustive, GroupShape, SimFailure
from stopway_sim.coverage import met
from stopway_sim.explore import Case, explore
from stopway_sim.places import Cause, Place

TP2 = GroupShape(tensor=2, pipeline=1, blocks=4, block_size=2, vocab=12)
PP2 = GroupShape(tensor=1, pipeline=2, blocks=4, block_size=2, vocab=12)
TIGHT = GroupShape(tensor=1, pipeline=2, blocks=3, block_size=2, vocab=12)
EVERY_END = {
    ("r0 client_cancel 0", "r1 length 2"),  # before its first token, from four states
    ("r0 client_cancel 1", "r1 length 2"),
    ("r0 length 2", "r1 length 2"),  # the stop came too late
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(TP2, 1, ((1,), (2,)), 0), id="tp2"),
        pytest.param(Case(PP2, 1, ((1, 2, 3), (1, 2, 4)), 0), id="pp2"),
        pytest.param(Case(PP2, 2, ((1, 2), (1, 2)), 0), id="pp2-window2"),
    ],
)
def test_every_interleaving_of_two_requests_and_one_stop(case: Case) -> None:
    found = explore(case)
    assert found.outcomes.keys() == EVERY_END
    for place in (Place.UNBORN, Place.QUEUED, Place.PREFILLING, Place.DECODING):
        times = met(found.coverage, place, Cause.UID)
        assert times or (place is Place.QUEUED and case.window == 2), place
    assert found.states > 900


def test_every_interleaving_when_blocks_are_short() -> None:
    found = explore(Case(TIGHT, 1, ((1, 2), (3, 4)), 0, max_tokens=3, batch_tokens=4))
    assert found.coverage["preemptions"] > 100
    assert ("r0 length 3", "r1 length 3") in found.outcomes


ONE = GroupShape(tensor=1, pipeline=1, blocks=4, block_size=2, vocab=12)
# Every three tokens of a vocabulary of two: a draft follows whatever was sampled.
PAIRS = GroupShape(tensor=1, pipeline=1, blocks=10, block_size=4, vocab=2)
REPEATS = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0)


def test_every_interleaving_where_steps_overlap() -> None:
    found = explore(Case(ONE, 2, ((1, 2),), 0, max_tokens=5, batch_tokens=4))
    assert met(found.coverage, Place.OVERLAPPED, Cause.UID)
    assert found.outcomes.keys() == {
        ("r0 length 5",),
        *((f"r0 client_cancel {count}",) for count in range(5)),
    }


def test_every_interleaving_with_drafts() -> None:
    case = Case(PAIRS, 1, (REPEATS, (1,)), 0, max_tokens=4, batch_tokens=16, draft_tokens=2)
    found = explore(case)
    assert met(found.coverage, Place.DRAFT, Cause.UID)
    assert ("r0 length 4", "r1 length 4") in found.outcomes


def test_every_interleaving_of_a_fork() -> None:
    found = explore(Case(PP2, 2, ((1, 2, 3),), 0, batch_tokens=4, choices=2))
    assert met(found.coverage, Place.SIBLING, Cause.UID) and found.coverage["forks"]
    ends = {end for outcome in found.outcomes for end in outcome}
    assert ends == {"r0 client_cancel 0", "r0 client_cancel 1", "r0 length 2"}


@pytest.mark.parametrize("grammar", ["3", "1", "2:0"])
def test_every_interleaving_of_a_compilation_and_a_stop(grammar: str) -> None:
    found = explore(Case(ONE, 1, ((1,), (2,)), 0, grammar=grammar))
    assert met(found.coverage, Place.COMPILING, Cause.UID)
    other = {"3": "r1 length 2", "1": "r1 bad_input 0", "2:0": "r1 bad_input 0"}[grammar]
    assert {outcome[1] for outcome in found.outcomes} == {other}
    assert {outcome[0].split()[1] for outcome in found.outcomes} == {
        "client_cancel", other.split()[1]
    }  # fmt: skip


def test_the_choices_that_lead_to_a_failure_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from stopway_core.replica import Replica

    def careless(self: Replica, admit: object) -> object:
        seq = original(self, admit)  # type: ignore[arg-type]
        seq.launched = min(1, len(seq.tokens) - 1)  # leaves out what nobody computed
        seq.confirmed = seq.launched
        return seq

    original = Replica.admit
    monkeypatch.setattr(Replica, "admit", careless)
    with pytest.raises(SimFailure, match=r"the choices \[.*undisturbed"):
        explore(Case(PP2, 1, ((1, 2, 3), (1, 2, 4)), 0))


def test_the_generator_makes_every_sequence_once() -> None:
    it, got = Exhaustive(), []
    while it.next():
        first = it.below(3)
        got.append((first, it.below(2) if first else None))
    assert got == [(0, None), (1, 0), (1, 1), (2, 0), (2, 1)]
