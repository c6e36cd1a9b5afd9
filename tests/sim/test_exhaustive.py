"""Two ranks, two requests, one stop: every order of everything."""

import pytest

from stopway_sim import Exhaustive, GroupShape, SimFailure
from stopway_sim.explore import Case, explore

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
    for state in ("unborn", "queued", "prefilling", "decoding"):
        met = found.coverage[f"end {state} x client_cancel"]
        assert met or (state == "queued" and case.window == 2), state
    assert found.states > 900


def test_every_interleaving_when_blocks_are_short() -> None:
    found = explore(Case(TIGHT, 1, ((1, 2), (3, 4)), 0, max_tokens=3, batch_tokens=4))
    assert found.coverage["preemptions"] > 100
    assert ("r0 length 3", "r1 length 3") in found.outcomes


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
