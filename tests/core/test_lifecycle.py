"""The table is complete, and its picture is the table."""

import itertools
import re

import pytest

from stopway_core import lifecycle
from stopway_core.lifecycle import TRANSITIONS, Event, IllegalTransition, State, after


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)])
def test_every_pair_is_in_the_table_or_raises(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event} in state {state}"):
            after(state, event)


def test_ended_is_left_by_nothing_and_reached_from_everywhere() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is State.ENDED]
    for state in set(State) - {State.ENDED}:
        assert after(state, Event.END) is State.ENDED


def drawn(picture: str) -> dict[tuple[State, Event], State]:
    """The transitions that the docstring's picture shows."""
    top, verticals, back, rule = [line for line in picture.splitlines() if line.startswith("    ")]
    shown = {
        (State[a], Event[e.upper()]): State[b]
        for a, e, b in re.findall(r"(?=\b([A-Z]+) --(\w+)--> ([A-Z]+))", top)
    }
    column = {m.group(): m.span() for m in re.finditer(r"[A-Z]+", top)}

    def state_at(at: int) -> State:
        return next(State[n] for n, (start, end) in column.items() if start <= at < end)

    (up,) = [i for i, char in enumerate(verticals) if char == "^"]
    corners = [i for i, char in enumerate(back) if char == "+"]
    events = re.findall(r"[a-z]+", back)
    assert corners[0] == up and len(events) == len(corners) - 1
    for corner, event in zip(corners[1:], events, strict=True):
        assert verticals[corner] == "|"
        shown[state_at(corner), Event[event.upper()]] = state_at(up)
    found = re.search(r"any but ([A-Z]+) --(\w+)--> ([A-Z]+)", rule)
    assert found is not None
    for state in set(State) - {State[found[1]]}:
        shown[state, Event[found[2].upper()]] = State[found[3]]
    return shown


def test_the_picture_in_the_docstring_is_the_table() -> None:
    assert lifecycle.__doc__ is not None
    assert drawn(lifecycle.__doc__) == TRANSITIONS
