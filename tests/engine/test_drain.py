"""A rank that is told to drain: what it does depends on whether it serves, which it alone knows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stopway_core.events import Mode
from stopway_core.signing import sign
from stopway_core.types import Reason, Stop, Target
from stopway_core.wire import Decoder, Frame, FrameKind, encode
from stopway_engine.config import PodConfig
from stopway_engine.control import goodbye
from stopway_engine.control.follower import Follower
from stopway_engine.control.goodbye import GOODBYE_S
from stopway_engine.control.leader import Leader
from stopway_engine.control.loop import EpochEnded
from stopway_engine.link import Link

SECRET = "0123456789abcdef"
EPOCH = 5


class NothingRuns:
    """An exec thread that loads when it is told to, and is never given a step."""

    started_at = None

    def __init__(self) -> None:
        self.ready = False
        self._ours, self._theirs = socket.socketpair()

    def load(self) -> None:
        self.ready = True
        self._theirs.send(b".")

    def fileno(self) -> int:
        return self._ours.fileno()

    def take(self) -> list[Any]:
        self._ours.recv(1)
        return []

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class End:
    """Our end of a rank's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._unread: list[Frame] = []

    def send(self, kind: FrameKind, body: Any) -> None:
        self.sock.sendall(encode(kind, body, epoch=EPOCH, turn=0))

    def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        """Read what the rank says here, until ``wanted``."""
        self.sock.settimeout(30)
        while True:
            while self._unread:
                if wanted(frame := self._unread.pop(0)):
                    return frame
            data = self.sock.recv(1 << 16)
            assert data, "the rank has closed its link"
            self._unread += self._decoder.feed(data)


class Running:
    """A rank's loop in a thread of its own; its pod and its peer are ours."""

    def __init__(self, rank: int, front: str = "/there/is/no/front") -> None:
        pod, ours = socket.socketpair()
        self.pod = End(ours)
        peer, ours = socket.socketpair()
        self.peer = End(ours)
        self.exec = NothingRuns()
        self._links = [Link(pod, "the pod"), Link(peer, "the peer")]
        # A beat is far away: what is told in these tests is told without one.
        config = PodConfig(
            secret=SECRET, tensor=1, pipeline=2, ranks_per_pod=1, pod_index=rank, peer_loss_s=1000
        )
        exec_thread: Any = self.exec
        self.loop: Leader | Follower
        if rank == 0:
            self.loop = Leader(
                config,
                EPOCH,
                ["n0", "n1"],
                {"max_model_len": 100, "max_batch_tokens": 64},
                32,
                self._links[0],
                self._links[1:],
                exec_thread,
                None,
                front,
            )
        else:
            self.loop = Follower(config, 1, EPOCH, 32, *self._links, exec_thread, None)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def drain(self) -> None:
        self.pod.send(FrameKind.POD_IN, {"drain": True})

    def until_state(self, state: str) -> None:
        """Until it has told its pod."""
        self.pod.until(lambda frame: frame.body.get("state") == state)

    def has_left(self) -> bool:
        self.thread.join(GOODBYE_S + 30)
        return not self.thread.is_alive()

    def close(self) -> None:
        for end in (self.pod, self.peer):
            end.sock.close()
        self.thread.join(30)
        front = getattr(self.loop, "_front", None)
        for link in [*self._links, *([front] if front is not None else [])]:
            link.close()
        self.loop.selector.close()
        self.exec.close()


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Running]:
    made = Running(request.param)
    yield made
    made.close()


def serving(front: str = "/there/is/no/front") -> Running:
    """A leader; it and its follower are loaded."""
    made = Running(0, front)
    made.exec.load()
    counters = {"applied": 0, "applied_at": 0.0, "executed": 0, "executed_at": 0.0}
    made.peer.send(FrameKind.PROGRESS, {"ready": True, "noticed": [], **counters})
    made.until_state("ready")
    return made


@pytest.fixture
def leader() -> Iterator[Running]:
    """One that serves."""
    made = serving()
    yield made
    made.close()


@pytest.fixture
def led(tmp_path: Path) -> Iterator[tuple[Running, End]]:
    """A leader that serves, and our end of its front's socket."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "front.sock"))
        listening.listen()
        listening.settimeout(30)
        made = serving(listening.getsockname())
        front = End(listening.accept()[0])
    front.until(lambda frame: "hello" in frame.body)
    yield made, front
    front.sock.close()
    made.close()


def a_stop_of_all() -> dict[str, Any]:
    stop = Stop("s", Target(everything=True), Reason.ADMIN, "ops", True, time.time())
    return sign(stop, SECRET)


@pytest.mark.parametrize("late", [False, True], ids=["nothing", "a stop"])
def test_what_comes_when_the_followers_are_sent_home_holds_nobody_up(
    leader: Running, late: bool
) -> None:
    leader.drain()
    leader.peer.until(lambda frame: frame.kind is FrameKind.FINAL)
    if late:
        notice = {"notice": a_stop_of_all(), "read_at": time.time()}
        leader.pod.send(FrameKind.POD_IN, notice)
    leader.peer.send(FrameKind.BYE, None)
    leader.peer.sock.shutdown(socket.SHUT_WR)
    assert leader.has_left() and leader.error is None
    if late:
        assert isinstance(leader.loop, Leader)
        assert leader.loop.book.get("s") is None  # no turn was made for it


def test_a_follower_that_does_not_leave_is_not_waited_for(leader: Running) -> None:
    leader.drain()
    leader.peer.until(lambda frame: frame.kind is FrameKind.FINAL)
    assert leader.has_left() and leader.error is None


def until_the_end(front: End) -> None:
    """Read all that the leader still says."""
    front.sock.settimeout(30)
    while front.sock.recv(1 << 16):
        pass


def test_a_leader_leaves_when_its_front_has_read_it_to_the_end(
    led: tuple[Running, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodbye, "GOODBYE_S", 1000.0)
    leader, front = led
    leader.drain()
    leader.peer.until(lambda frame: frame.kind is FrameKind.FINAL)
    leader.peer.sock.shutdown(socket.SHUT_WR)
    until_the_end(front)
    front.send(FrameKind.FRONT_IN, {"ledger": 1})  # one that has not read it all may ask yet
    for _ in range(40):  # more than a socket takes: all before it has been read
        front.send(FrameKind.FRONT_IN, {"lease_lost": "x" * 60_000})
    assert leader.thread.is_alive()
    front.sock.close()
    assert leader.has_left() and leader.error is None


def test_a_front_that_stands_still_is_not_waited_for_long(
    led: tuple[Running, End],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(goodbye, "GOODBYE_S", 0.05)
    leader, _ = led
    leader.drain()
    assert leader.has_left() and leader.error is None
    assert "has not read" in capfd.readouterr().err


def test_every_word_of_a_mode_is_answered(led: tuple[Running, End]) -> None:
    _, front = led
    words = [Mode.WAITING, Mode.RUNNING]  # in one pass: what was in force is so again
    front.sock.sendall(b"".join(encode(FrameKind.FRONT_IN, {"mode": mode}) for mode in words))
    assert front.until(lambda frame: "mode" in frame.body).body["mode"] == "running"
    front.send(FrameKind.FRONT_IN, {"mode": Mode.RUNNING})
    assert front.until(lambda frame: "mode" in frame.body).body["mode"] == "running"
    front.send(FrameKind.FRONT_IN, {"mode": Mode.WAITING})
    assert front.until(lambda frame: "mode" in frame.body).body["mode"] == "wait"


def test_a_pod_is_told_at_once_that_its_leader_drains(leader: Running) -> None:
    leader.peer.send(FrameKind.REPORT, {"drain": True})
    leader.until_state("draining")


@pytest.mark.parametrize("rank", [0, 1], indirect=True)
def test_a_rank_that_serves_nothing_yet_leaves_at_once(rank: Running) -> None:
    rank.until_state("loading")
    rank.drain()
    assert rank.has_left() and isinstance(rank.error, EpochEnded)


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_a_group_that_serves_nothing_yet_ends_when_a_follower_drains(rank: Running) -> None:
    rank.until_state("loading")
    rank.peer.send(FrameKind.REPORT, {"drain": True})
    assert rank.has_left() and isinstance(rank.error, EpochEnded)


@pytest.mark.parametrize("rank", [1], indirect=True)
def test_a_follower_that_is_loaded_passes_a_drain_on(rank: Running) -> None:
    rank.exec.load()
    rank.until_state("ready")  # without waiting for the next beat
    rank.drain()
    rank.peer.until(lambda frame: frame.kind is FrameKind.REPORT and frame.body == {"drain": True})
    rank.peer.send(FrameKind.FINAL, None)
    rank.peer.until(lambda frame: frame.kind is FrameKind.BYE)
    assert rank.has_left() and rank.error is None


def test_a_follower_that_was_sent_home_has_no_drain_to_pass_on() -> None:
    pod, peer = socket.socketpair(), socket.socketpair()
    links = Link(pod[0], "the pod"), Link(peer[0], "the leader")
    idle: Any = NothingRuns()
    config = PodConfig(secret=SECRET, pipeline=2, ranks_per_pod=1, pod_index=1)
    follower = Follower(config, 1, EPOCH, 32, *links, idle, None)
    follower.ready = True
    follower.on_frame(links[1], Frame(FrameKind.FINAL, EPOCH, 0, None, []))
    peer[1].close()  # the leader has gone
    follower.on_drain()
    follower.selector.close()
    idle.close()
    for link in links:
        link.close()
    pod[1].close()
