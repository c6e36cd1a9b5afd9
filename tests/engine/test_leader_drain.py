"""The leader's last moments: a drain ends when its followers have left, whatever still comes."""

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
from stopway_engine.control.leader import GOODBYE_S, Leader
from stopway_engine.link import Link

SECRET = "0123456789abcdef"
EPOCH = 5


class NothingRuns:
    """An exec thread that has loaded, and is never given a step."""

    ready = True
    started_at = None

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b".")  # it has loaded

    def fileno(self) -> int:
        return self._ours.fileno()

    def take(self) -> list[Any]:
        self._ours.recv(1)
        return []

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Group:
    """A leader in a thread of its own; its pod and its follower are ours."""

    def __init__(self) -> None:
        leader_pod, self.pod = socket.socketpair()
        leader_follower, self.follower = socket.socketpair()
        self._exec = NothingRuns()
        self._links = [Link(leader_pod, "the pod"), Link(leader_follower, "rank 1")]
        self.leader = Leader(
            PodConfig(secret=SECRET, tensor=1, pipeline=2, ranks_per_pod=1),
            EPOCH,
            ["n0", "n1"],
            {"max_model_len": 100, "max_batch_tokens": 64},
            32,
            self._links[0],
            self._links[1:],
            self._exec,
            None,
            "/there/is/no/front",
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self.leader.run()
        except BaseException as error:
            self.error = error

    def tell_pod(self, body: dict[str, Any]) -> None:
        self.pod.sendall(encode(FrameKind.POD_IN, body))

    def from_follower(self, kind: FrameKind, body: Any) -> None:
        self.follower.sendall(encode(kind, body, epoch=EPOCH, turn=0))

    def say_ready(self) -> None:
        counters = {"applied": 0, "applied_at": 0.0, "executed": 0, "executed_at": 0.0}
        self.from_follower(FrameKind.PROGRESS, {"ready": True, "noticed": [], **counters})

    def close(self) -> None:
        for sock in (self.pod, self.follower):
            sock.close()
        self.thread.join(30)
        for link in self._links:
            link.close()
        self.leader.selector.close()
        self._exec.close()

    def until(self, wanted: Callable[[Frame], bool]) -> None:
        """Read what the follower is sent, until ``wanted``."""
        decoder = Decoder()
        self.follower.settimeout(30)
        while data := self.follower.recv(1 << 16):
            if any(wanted(frame) for frame in decoder.feed(data)):
                return
        raise AssertionError("the leader has closed its link")


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    made.thread.start()
    made.say_ready()
    yield made
    made.close()


def a_stop_of_all() -> dict[str, Any]:
    stop = Stop("s", Target(everything=True), Reason.ADMIN, "ops", True, time.time())
    return sign(stop, SECRET)


@pytest.mark.parametrize("late", [False, True], ids=["nothing", "a stop"])
def test_what_comes_when_the_followers_are_sent_home_holds_nobody_up(
    group: Group, late: bool
) -> None:
    group.tell_pod({"drain": True})
    group.until(lambda frame: frame.kind is FrameKind.FINAL)
    if late:
        group.tell_pod({"notice": a_stop_of_all(), "read_at": time.time()})
    group.from_follower(FrameKind.BYE, None)
    group.follower.shutdown(socket.SHUT_WR)
    group.thread.join(30)
    assert not group.thread.is_alive() and group.error is None
    if late:
        assert group.leader.book.get("s") is None  # no turn was made for it


def test_a_follower_that_does_not_leave_is_not_waited_for(group: Group) -> None:
    group.tell_pod({"drain": True})
    group.until(lambda frame: frame.kind is FrameKind.FINAL)
    group.thread.join(GOODBYE_S + 30)
    assert not group.thread.is_alive() and group.error is None
