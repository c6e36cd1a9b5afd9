"""Ranks meet only when both know the secret and are of one group."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stopway_cli.stack import ports
from stopway_core.wire import FrameKind, encode
from stopway_engine.config import PodConfig
from stopway_engine.control import forming, handshake
from stopway_engine.control.forming import Formed, LeaderForming, join
from stopway_engine.control.handshake import HandshakeError
from stopway_engine.link import Link, LinkClosed

SECRET = "s" * 32
SOON_S = 30.0


def config(port: int, secret: str = SECRET, tensor: int = 2) -> PodConfig:
    return PodConfig(control_port=port, secret=secret, tensor=tensor, ranks_per_pod=tensor)


def hello(rank: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "group": "stopway-g0",
        "rank": rank,
        "pod_uid": f"uid{rank}",
        "node": f"n{rank}",
        "fingerprint": "f",
        "blocks": 100 - rank,
        "last_epoch": 7,
    }
    return {**fields, **changes}


@pytest.fixture
def port() -> int:
    """A free one that no outgoing connection can take."""
    return ports.free_ports(1, "127.0.0.1")[0]


class Abandoned(Exception):
    pass


class Result:
    """A side of a handshake in a thread of its own; ``call`` gets what it must call as it waits."""

    def __init__(self, call: Callable[[Callable[[], None]], Formed]) -> None:
        self.formed: Formed | None = None
        self._call = call
        self._abandoned = False
        self.beats = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Abandoned):
            self.formed = self._call(self._beat)

    def _beat(self) -> None:
        self.beats += 1
        if self._abandoned:
            raise Abandoned

    def abandon(self) -> None:
        """Give up, unless it has come to its end."""
        self._abandoned = True
        self.thread.join(SOON_S)
        assert not self.thread.is_alive()

    def wait(self, seconds: float = SOON_S) -> Formed:
        self.thread.join(seconds)
        assert self.formed is not None, "the group did not form"
        return self.formed


Start = Callable[[Callable[[Callable[[], None]], Formed]], Result]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts sides; whatever a test leaves of them ends with it."""
    sides: list[Result] = []

    def begin(call: Callable[[Callable[[], None]], Formed]) -> Result:
        sides.append(Result(call))
        return sides[-1]

    yield begin
    for side in sides:
        side.abandon()
        for link in side.formed.links if side.formed is not None else ():
            link.close()


@pytest.fixture
def lead(port: int, start: Start) -> Callable[..., Result]:
    def begin(tensor: int = 2) -> Result:
        settings = config(port, tensor=tensor)
        return start(lambda beat: LeaderForming(settings, hello(0), lambda: 1234, beat).run())

    return begin


@pytest.fixture
def leader(lead: Callable[..., Result]) -> Result:
    return lead()


@pytest.fixture
def follow(port: int, start: Start) -> Callable[..., Result]:
    def begin(rank: int = 1, tensor: int = 2, **changes: Any) -> Result:
        settings = config(port, tensor=tensor)
        return start(lambda beat: join(settings, hello(rank, **changes), beat))

    return begin


Follow = Callable[..., Result]


def test_a_group_forms_with_one_epoch_and_the_fewest_blocks(leader: Result, follow: Follow) -> None:
    follower = follow().wait()
    formed = leader.wait()
    assert formed.epoch == follower.epoch
    assert formed.epoch > time.time() * 1000 - 60_000
    assert formed.blocks == follower.blocks == 99
    assert (formed.store_port, follower.store_port) == (1234, 1234)
    assert formed.nodes == ["n0", "n1"]


def test_an_epoch_is_later_than_any_that_a_member_has_seen(leader: Result, follow: Follow) -> None:
    future = int(time.time() * 1000) + 10**9
    follow(last_epoch=future).wait()
    assert leader.wait().epoch == future + 1


def test_case_o10_a_follower_that_is_first_tries_again(
    lead: Callable[..., Result], follow: Follow
) -> None:
    follower = follow()
    end = time.monotonic() + SOON_S
    while follower.beats < 3:  # it has tried twice, and found nobody
        assert time.monotonic() < end, "it does not try again"
        time.sleep(0.01)
    assert follower.formed is None
    assert lead().wait().epoch == follower.wait().epoch


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "other"}, {"group": "other"}, {"rank": 2}, {"rank": 0}]
)
def test_a_stranger_is_refused_and_the_right_one_is_taken(
    port: int,
    leader: Result,
    follow: Follow,
    changes: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    until_listening(port)
    with pytest.raises((LinkClosed, OSError)):
        forming._attempt(config(port), hello(1) | changes, lambda: None)
    assert follow().wait().epoch == leader.wait().epoch
    assert "was refused" in capfd.readouterr().err


def test_another_secret_is_refused_by_both_sides(port: int, leader: Result, follow: Follow) -> None:
    until_listening(port)
    with pytest.raises((LinkClosed, OSError)):
        forming._attempt(config(port, "t" * 32), hello(1), lambda: None)
    follow().wait()
    assert leader.wait().links


def test_a_newer_process_of_a_rank_replaces_the_older(
    port: int, lead: Callable[..., Result], follow: Follow
) -> None:
    """Its predecessor died while the group was still forming."""
    leading = lead(tensor=3)
    until_listening(port)
    follow(1, tensor=3, pod_uid="old")
    follow(1, tensor=3, node="new")
    other = follow(2, tensor=3)
    formed = leading.wait()
    assert other.wait().epoch == formed.epoch
    # The two of rank 1 replace one another until one is in when rank 2 comes; exactly one is.
    assert formed.nodes[1] in ("new", "n1")


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, encode(FrameKind.TURN, {"x": 1}), b"SW\x01"],
)
def test_garbage_on_the_control_port_hurts_nobody(
    port: int, leader: Result, follow: Follow, garbage: bytes
) -> None:
    until_listening(port)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(garbage)
        assert follow().wait().epoch == leader.wait().epoch


def test_a_hello_cannot_be_replayed_under_another_nonce() -> None:
    frame = _frame(handshake.sealed(FrameKind.HELLO, SECRET, "nonce-1", hello(1)))
    assert handshake.unsealed(frame, FrameKind.HELLO, SECRET, "nonce-1")["rank"] == 1
    with pytest.raises(HandshakeError):
        handshake.unsealed(frame, FrameKind.HELLO, SECRET, "nonce-2")
    with pytest.raises(HandshakeError):
        handshake.unsealed(frame, FrameKind.WELCOME, SECRET, "nonce-1")


def test_a_link_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopway_engine.link.QUEUE_MAX", 1 << 20)
    ours, theirs = socket.socketpair()
    link = Link(ours, "a peer")
    with theirs, pytest.raises(LinkClosed, match="does not read"):
        for _ in range(100):
            link.send(b"x" * (1 << 17))
    link.close()


def until_listening(port: int) -> None:
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError("the leader does not listen")


def _frame(data: bytes) -> Any:
    from stopway_core.wire import Decoder

    (frame,) = Decoder().feed(data)
    return frame
