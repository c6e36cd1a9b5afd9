"""Frames: a struct header, a JSON body and raw int32 arrays. Nothing here can execute anything.

A frame is ``header | body | arrays``::

    magic  2s   b"SW"
    version u8  WIRE_VERSION
    kind    u8  FrameKind
    epoch   u64 the life of the group that this frame belongs to (0: not in one yet)
    turn    u64 the newest turn that the sender has applied (or, in a Turn, its number)
    body    u32 length of the JSON body in bytes
    arrays  u16 number of int32 arrays; each is a u32 length (elements), then the elements

All integers are little-endian. Lengths are bounded, so a hostile peer cannot make us allocate.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

WIRE_VERSION = 1
MAX_BODY = 16 * 1024 * 1024
MAX_ARRAYS = 4096
MAX_ELEMENTS = 16 * 1024 * 1024  # of all arrays of a frame together
MAGIC = b"SW"

_HEADER = struct.Struct("<2sBBQQIH")
_LENGTH = struct.Struct("<I")
_SWAP = sys.byteorder == "big"


class WireError(Exception):
    """A frame that cannot be what the peer meant; the connection that brought it is of no use."""


class FrameKind(IntEnum):
    """Every message between the processes of a group, and the direction that it travels."""

    # leader -> follower
    CHALLENGE = 1
    WELCOME = 2
    TURN = 3
    KEEPALIVE = 4
    FINAL = 5
    # follower -> leader
    HELLO = 10
    PROGRESS = 11
    RESULT = 12
    REPORT = 13
    BYE = 14
    # front -> leader rank, and back
    FRONT_IN = 20
    FRONT_OUT = 21
    # supervise -> rank, and back
    POD_IN = 30
    POD_OUT = 31


class Frame(NamedTuple):
    """One decoded frame. ``arrays`` are ``array('i')`` (int32)."""

    kind: FrameKind
    epoch: int
    turn: int
    body: Any
    arrays: list[array[int]]


def encode(
    kind: FrameKind,
    body: Any = None,
    arrays: Iterable[Iterable[int]] = (),
    *,
    epoch: int = 0,
    turn: int = 0,
) -> bytes:
    """The bytes of one frame. Raises ``WireError`` when it would exceed the bounds."""
    text = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    if len(text) > MAX_BODY:
        raise WireError(f"frame body of {len(text)} bytes exceeds {MAX_BODY}")
    parts = [b""]
    count = total = 0
    for values in arrays:
        packed = (
            values if isinstance(values, array) and values.typecode == "i" else array("i", values)
        )
        if _SWAP:
            packed = packed[:]
            packed.byteswap()
        parts.append(_LENGTH.pack(len(packed)))
        parts.append(packed.tobytes())
        count += 1
        total += len(packed)
    if count > MAX_ARRAYS or total > MAX_ELEMENTS:
        raise WireError(
            f"frame with {count} arrays of {total} elements exceeds {MAX_ARRAYS} of {MAX_ELEMENTS}"
        )
    parts[0] = _HEADER.pack(MAGIC, WIRE_VERSION, kind, epoch, turn, len(text), count) + text
    return b"".join(parts)


class Decoder:
    """Bytes in, frames out: feed whatever a socket gave, take the frames that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Yield each frame that ``data`` completes. Raises ``WireError`` on a malformed one."""
        self._buffer += data
        start = 0
        try:
            while (found := self._parse(start)) is not None:
                frame, start = found
                yield frame
        finally:
            if start:
                del self._buffer[:start]

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._buffer)

    def _parse(self, at: int) -> tuple[Frame, int] | None:
        buffer = self._buffer
        if len(buffer) - at < _HEADER.size:
            return None
        magic, version, kind, epoch, turn, body_len, count = _HEADER.unpack_from(buffer, at)
        if magic != MAGIC or version != WIRE_VERSION:
            raise WireError(f"not a Stopway frame of version {WIRE_VERSION}: {magic!r} {version}")
        if body_len > MAX_BODY or count > MAX_ARRAYS:
            raise WireError(f"frame out of bounds: body {body_len}, arrays {count}")
        at += _HEADER.size
        if len(buffer) - at < body_len:
            return None
        body_at = at
        at += body_len
        arrays: list[array[int]] = []
        total = 0
        for _ in range(count):
            if len(buffer) - at < _LENGTH.size:
                return None
            (elements,) = _LENGTH.unpack_from(buffer, at)
            total += elements
            if total > MAX_ELEMENTS:
                raise WireError(f"arrays of {total} elements exceed {MAX_ELEMENTS}")
            at += _LENGTH.size
            if len(buffer) - at < 4 * elements:
                return None
            values = array("i")
            values.frombytes(buffer[at : at + 4 * elements])
            if _SWAP:
                values.byteswap()
            arrays.append(values)
            at += 4 * elements
        try:
            body = json.loads(buffer[body_at : body_at + body_len]) if body_len else None
            return Frame(FrameKind(kind), epoch, turn, body, arrays), at
        except (ValueError, RecursionError) as error:
            raise WireError(f"frame of kind {kind} cannot be read: {error}") from None
