"""When a peer counts as lost: it was silent, and we were there to hear it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stopway_engine.config import PodConfig
from stopway_engine.control.follower import Follower
from stopway_engine.control.loop import EpochEnded
from stopway_engine.link import Link

PEER_LOSS_S = 3.0
BEAT_S = PEER_LOSS_S / 10
PASS_S = BEAT_S / 2  # of the loop


class Idle:
    """An exec thread that does nothing."""

    started_at = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()


@pytest.fixture
def follower() -> Iterator[Follower]:
    pairs = [socket.socketpair() for _ in range(3)]
    idle: Any = Idle(pairs[2][0])
    config = PodConfig(
        secret="s" * 16, tensor=1, pipeline=2, ranks_per_pod=1, pod_index=1, peer_loss_s=PEER_LOSS_S
    )
    pod, leader = Link(pairs[0][0], "the pod"), Link(pairs[1][0], "the leader")
    made = Follower(config, 1, 7, 32, pod, leader, idle, None)
    yield made
    made.selector.close()
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_peer_that_is_silent_is_lost(follower: Follower) -> None:
    began = time.monotonic()
    with pytest.raises(EpochEnded, match="the leader has been silent"):
        for pass_ in range(30):
            follower._tick(began + pass_ * PASS_S)
    assert PEER_LOSS_S <= pass_ * PASS_S <= PEER_LOSS_S + 2 * BEAT_S


def test_the_time_in_which_nobody_listened_does_not_count(follower: Follower) -> None:
    began = time.monotonic()
    for pass_ in range(10):
        follower._tick(began + pass_ * PASS_S)
    late = began + 100 * PEER_LOSS_S
    with pytest.raises(EpochEnded):
        for pass_ in range(30):
            follower._tick(late + pass_ * PASS_S)
    assert PEER_LOSS_S / 2 - BEAT_S <= pass_ * PASS_S <= PEER_LOSS_S / 2 + 2 * BEAT_S
