"""A rank that is told to drain: what it does depends on whether it serves, which it alone knows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stopway_core.signing import sign
from stopway_core.types import Reason, Stop, Target
from stopway_core.wire import Decoder, Frame, FrameKind, encode
from stopway_engine.config import PodConfig
from stopway_engine.control.follower import Follower
from stopway_engine.control.leader import GOODBYE_S, Leader
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

    def until(self, wanted: Callable[[Frame], bool]) -> None:
        """Read what the rank says here, until ``wanted``."""
        self.sock.settimeout(30)
        while True:
            while self._unread:
                if wanted(self._unread.pop(0)):
                    return
            data = self.sock.recv(1 << 16)
            assert data, "the rank has closed its link"
            self._unread += self._decoder.feed(data)


class Running:
    """A rank's loop in a thread of its own; its pod and its peer are ours."""

    def __init__(self, rank: int) -> None:
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
                "/there/is/no/front",
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
        for link in self._links:
            link.close()
        self.loop.selector.close()
        self.exec.close()


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Running]:
    made = Running(request.param)
    yield made
    made.close()


@pytest.fixture
def leader() -> Iterator[Running]:
    """One that serves: it and its follower are loaded."""
    made = Running(0)
    made.exec.load()
    counters = {"applied": 0, "applied_at": 0.0, "executed": 0, "executed_at": 0.0}
    made.peer.send(FrameKind.PROGRESS, {"ready": True, "noticed": [], **counters})
    made.until_state("ready")
    yield made
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
