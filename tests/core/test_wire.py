"""Frames: whole, in pieces, hostile."""

import contextlib
import struct
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stopway_core import wire
from stopway_core.wire import Decoder, Frame, FrameKind, WireError, encode

INT32 = st.integers(-(2**31), 2**31 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FRAMES = st.tuples(
    st.sampled_from(FrameKind),
    JSON,
    st.lists(st.lists(INT32, max_size=6), max_size=4),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)


def decode(data: bytes) -> list[Frame]:
    return list(Decoder().feed(data))


def header(
    *, magic: bytes = b"SW", version: int = 1, kind: int = 3, body: int = 0, arrays: int = 0
) -> bytes:
    return struct.pack("<2sBBQQIH", magic, version, kind, 1, 1, body, arrays)


@settings(deadline=None)
@given(st.lists(FRAMES, max_size=4), st.data())
def test_round_trip_in_any_pieces(frames: list, data: st.DataObject) -> None:
    sent = [
        Frame(kind, epoch, turn, body, [array("i", a) for a in arrays])
        for kind, body, arrays, epoch, turn in frames
    ]
    blob = b"".join(encode(f.kind, f.body, f.arrays, epoch=f.epoch, turn=f.turn) for f in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(blob)), max_size=8)))
    decoder, got = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(blob)], strict=True):
        got += list(decoder.feed(blob[start:end]))
    assert got == sent
    assert decoder.pending == 0


def test_split_at_every_byte() -> None:
    blob = encode(FrameKind.TURN, {"a": [1, "é"]}, [[1, -2], [], [3]], epoch=5, turn=6)
    (whole,) = decode(blob)
    for cut in range(len(blob) + 1):
        decoder = Decoder()
        first = list(decoder.feed(blob[:cut]))
        assert decoder.pending == (0 if first else cut)
        assert first + list(decoder.feed(blob[cut:])) == [whole]


def test_a_truncated_frame_is_waited_for_and_not_guessed() -> None:
    blob = encode(FrameKind.HELLO, {"x": 1}, [[1, 2, 3]])
    for cut in range(len(blob)):
        assert decode(blob[:cut]) == []


@pytest.mark.parametrize(
    "bad",
    [
        header(magic=b"HT"),
        header(version=2),
        header(kind=99),
        header(body=wire.MAX_BODY + 1),
        header(body=0xFFFFFFFF),
        header(arrays=wire.MAX_ARRAYS + 1),
        header(arrays=1) + struct.pack("<I", wire.MAX_ELEMENTS + 1),
        header(arrays=1) + struct.pack("<I", 0xFFFFFFFF),
        header(body=1) + b"{",
        header(body=2) + b"\xff\xfe",
        header(body=20_000) + b"[" * 20_000,
        header(body=6_000) + b"9" * 6_000,
        b"GET / HTTP/1.1\r\nHost: leader\r\n\r\n",
    ],
)
def test_what_cannot_be_a_frame_is_refused_at_once(bad: bytes) -> None:
    with pytest.raises(WireError):
        decode(bad)


def test_arrays_are_bounded_together_so_that_no_peer_fills_our_memory() -> None:
    half = wire.MAX_ELEMENTS // 2 + 1
    blob = header(arrays=2) + struct.pack("<I", half) + bytes(4 * half) + struct.pack("<I", half)
    with pytest.raises(WireError, match="exceed"):
        decode(blob)


def test_what_would_be_refused_there_is_not_sent_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError):
        encode(FrameKind.TURN, None, [[]] * (wire.MAX_ARRAYS + 1))
    monkeypatch.setattr(wire, "MAX_BODY", 8)
    with pytest.raises(WireError):
        encode(FrameKind.TURN, {"long": "enough"})
    monkeypatch.setattr(wire, "MAX_ELEMENTS", 8)
    with pytest.raises(WireError):
        encode(FrameKind.TURN, None, [[1] * 5, [1] * 5])


def test_good_frames_before_a_bad_one_are_not_lost() -> None:
    good = encode(FrameKind.KEEPALIVE, {"n": 1})
    decoder, got = Decoder(), []
    with pytest.raises(WireError):
        for frame in decoder.feed(good + b"garbage that is long enough to be a header"):
            got.append(frame)
    assert [frame.body for frame in got] == [{"n": 1}]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_frames_raise_wire_errors_and_nothing_else(data: st.DataObject) -> None:
    blob = bytearray(encode(FrameKind.TURN, {"r": [1], "d": 7}, [[1, 2], [3]], epoch=1, turn=2))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode(bytes(blob))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_raises_wire_errors_and_nothing_else(noise: bytes) -> None:
    for blob in (noise, b"SW\x01" + noise):
        with contextlib.suppress(WireError):
            decode(blob)
