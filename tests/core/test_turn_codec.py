"""Turns survive the wire exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stopway_core.turn import (
    Admit,
    Compile,
    Launch,
    Sampled,
    StopEntry,
    Turn,
    decode_turn,
    encode_turn,
)
from stopway_core.types import SamplingParams
from stopway_core.wire import Decoder, Frame, FrameKind, WireError, encode

IDS = st.integers(0, 2**31 - 1)
LISTS = st.lists(IDS, max_size=5)
SIGNED = st.lists(st.integers(-2, 2**31 - 1), max_size=5)  # REJECTED and DROPPED are below zero
REAL = st.floats(-4, 4)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=IDS,
    min_tokens=IDS,
    temperature=REAL,
    top_p=REAL,
    top_k=IDS,
    min_p=REAL,
    presence_penalty=REAL,
    frequency_penalty=REAL,
    repetition_penalty=REAL,
    seed=st.integers(0, 2**63),
    logprobs=st.integers(-1, 20),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(IDS, max_size=3).map(tuple),
)
TURNS = st.builds(
    Turn,
    number=st.integers(0, 2**63),
    results=st.lists(st.builds(Sampled, IDS, SIGNED, LISTS), max_size=3),
    compiled=LISTS,
    ends=LISTS,
    stops=st.lists(st.builds(StopEntry, st.text(), st.text(), LISTS), max_size=3),
    preempts=LISTS,
    evicts=IDS,
    forgets=LISTS,
    compiles=st.lists(st.builds(Compile, IDS, st.text()), max_size=2),
    admits=st.lists(st.builds(Admit, IDS, LISTS, IDS, PARAMS, st.text(), IDS, IDS), max_size=2),
    launch=st.none() | st.builds(Launch, IDS, LISTS, LISTS, LISTS, st.lists(LISTS, max_size=3)),
    digest=st.none() | st.integers(0, 2**64 - 1),
)


def through(turn: Turn, epoch: int = 3) -> Turn:
    (frame,) = Decoder().feed(encode_turn(turn, epoch))
    assert frame.epoch == epoch
    return decode_turn(frame)


@settings(deadline=None)
@given(TURNS)
def test_round_trip(turn: Turn) -> None:
    assert through(turn) == turn


def test_a_burst_of_stops_fits_in_one_turn() -> None:
    turn = Turn(1, stops=[StopEntry(f"s{i}", "", [i]) for i in range(10_000)])
    assert through(turn) == turn


@pytest.mark.parametrize(
    ("body", "arrays"),
    [
        (None, [[], []]),
        ([], [[], []]),
        ("r", [[], []]),
        ({}, []),
        ({"r": [1]}, [[], []]),
        ({"r": 5}, [[], []]),
        ({"s": [["id"]]}, [[], [], [0], []]),
        ({"s": [["id", "tp"]]}, [[], [], [], []]),
        ({"a": [[1, 2, 3, "x"]]}, [[], [], []]),
        ({"a": [[1, 2, {"nonsense": 1}, "x"]]}, [[], [], []]),
        ({"a": [5]}, [[], [], []]),
        ({"a": [[1, 2, {}, "x", 0]]}, [[], [], []]),
        ({"g": [[1], []]}, [[], []]),
        ({"g": [[1], [], [[1]]]}, [[], []]),
        ({"l": [1, 1]}, [[], [], [1], [], [], [2]]),
        ({"r": [[1, 1]]}, [[], [], [1]]),
        ({"l": 1}, [[], [], [1]]),
    ],
)
def test_what_is_not_a_turn_raises_a_wire_error(body: object, arrays: list[list[int]]) -> None:
    (frame,) = Decoder().feed(encode(FrameKind.TURN, body, arrays))
    with pytest.raises(WireError):
        decode_turn(frame)


def test_another_kind_of_frame_is_not_a_turn() -> None:
    with pytest.raises(WireError):
        decode_turn(Frame(FrameKind.PROGRESS, 1, 1, {}, []))


@settings(deadline=None, max_examples=200)
@given(TURNS, st.data())
def test_damaged_turns_raise_wire_errors_and_nothing_else(turn: Turn, data: st.DataObject) -> None:
    blob = bytearray(encode_turn(turn, 1))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        for frame in Decoder().feed(blob):
            decode_turn(frame)
    except WireError:
        pass


def test_an_empty_turn_says_so() -> None:
    assert Turn(5, digest=1).empty
    for field, value in (
        ("results", [Sampled(1, [], [])]),
        ("compiled", [1]),
        ("ends", [1]),
        ("stops", [StopEntry("s", "", [])]),
        ("preempts", [1]),
        ("evicts", 1),
        ("forgets", [1]),
        ("compiles", [Compile(1, "g")]),
        ("admits", [Admit(1, [1], 1, SamplingParams(), "")]),
        ("launch", Launch(1, [1], [], [])),
    ):
        assert not Turn(5, **{field: value}).empty
