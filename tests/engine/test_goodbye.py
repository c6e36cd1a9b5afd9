"""How a leader leaves: its followers first, then its front, once that has read everything."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from stopway_core.wire import Decoder, FrameKind, encode
from stopway_engine.control.goodbye import GOODBYE_S, Goodbye
from stopway_engine.link import Link, LinkClosed


class Front:
    """Counts how often it is told that nothing more comes."""

    def __init__(self) -> None:
        self.finished = 0

    def finish(self) -> None:
        self.finished += 1


def over(goodbye: Goodbye, mono: float, followers: int, front: Any) -> bool:
    links: list[Any] = [object()] * followers
    return goodbye.over(mono, links, front)


def test_the_front_is_waited_for_when_the_followers_have_gone() -> None:
    front, goodbye = Front(), Goodbye(100.0)
    assert not over(goodbye, 100.0, 1, front) and not front.finished
    assert not over(goodbye, 101.0, 0, front) and front.finished == 1
    assert not over(goodbye, 101.5, 0, front) and front.finished == 1
    assert over(goodbye, 101.6, 0, None)


def test_nobody_who_stands_still_is_waited_for_long() -> None:
    front, goodbye = Front(), Goodbye(100.0)
    assert not over(goodbye, 99.9 + GOODBYE_S, 1, front) and not front.finished
    gone = goodbye.until
    assert not over(goodbye, gone, 1, front) and front.finished == 1
    assert goodbye.until == gone + GOODBYE_S
    assert over(goodbye, goodbye.until, 1, front)


def test_alone_it_leaves_at_once() -> None:
    assert over(Goodbye(100.0), 100.0, 0, None)


def test_a_link_that_finishes_sends_all_first_and_goes_on_reading() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, "the front")
    words = [{"number": number, "text": "x" * 100_000} for number in range(40)]
    for word in words:  # more than a socket takes
        link.send(encode(FrameKind.FRONT_OUT, word))
    link.finish()
    theirs.settimeout(30)
    decoder, got, more = Decoder(), [], True
    while more:
        with contextlib.suppress(LinkClosed):
            link.flush()
        data = theirs.recv(1 << 18)
        got += [frame.body for frame in decoder.feed(data)]
        more = bool(data)
    assert got == words
    theirs.sendall(encode(FrameKind.FRONT_IN, {"late": True}))
    assert [frame.body for frame in link.frames(0.0)] == [{"late": True}]
    theirs.close()
    link.close()
