"""Processes of a pod: frames arrive whole, an exit is told once and for all."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stopway_core.wire import Decoder, Frame, FrameKind, encode
from stopway_engine.config import EXIT_CONFIG, PodConfig
from stopway_engine.front.stops import FrontStops
from stopway_engine.link import Link, LinkClosed
from stopway_engine.pod import children
from stopway_engine.pod.children import RankProcess, wait_for_exit
from stopway_engine.supervise import Supervisor

from .signals import ignores_sigint


class Unstarted(RankProcess):
    """Only its end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent = bytearray()
        self.code = None
        self.killed = False

    def kill(self) -> None:
        self.killed = True


async def test_large_notices_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    rank = Unstarted(ours)
    for number in range(20):
        rank.send({"number": number, "ids": ["x" * 120] * 1000})
    theirs.setblocking(False)
    decoder, got = Decoder(), []
    async with asyncio.timeout(30):
        while len(got) < 20:
            data = await asyncio.get_running_loop().sock_recv(theirs, 4096)
            got += [frame.body["number"] for frame in decoder.feed(data)]
    assert got == list(range(20))
    assert not rank.killed
    ours.close()
    theirs.close()


async def test_a_rank_that_never_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "UNSENT_MAX", 1 << 20)
    ours, theirs = socket.socketpair()
    rank = Unstarted(ours)
    for _ in range(20):
        rank.send({"ids": ["x" * 120] * 1000})
    assert rank.killed
    asyncio.get_running_loop().remove_writer(ours)
    ours.close()
    theirs.close()


async def test_a_rank_that_hears_no_word_yet_is_ended_by_a_drain() -> None:
    """It has only just started: no word would be read before it has met its group."""
    rank = RankProcess(0, dict(os.environ), lambda rank, frame: None)
    try:
        rank.drain()
        assert await asyncio.wait_for(rank.run(), 60) == -signal.SIGTERM
    finally:
        rank.kill()


@pytest.mark.model
async def test_a_rank_is_deaf_to_a_terminal() -> None:
    """Its Ctrl-C goes to all processes in the foreground; ``supervise`` decides."""
    states: list[str] = []
    deaf: list[bool] = []

    def on_frame(rank: RankProcess, frame: Frame) -> None:
        states.append(frame.body.get("state", "fatal"))
        deaf.append(ignores_sigint(rank.pid))
        rank.kill()

    env = {"STOPWAY_SECRET": "s" * 32, "STOPWAY_PIPELINE": "2", "STOPWAY_RANKS_PER_POD": "2"}
    rank = RankProcess(1, {**os.environ, **env}, on_frame)
    await asyncio.wait_for(rank.run(), 60)
    assert states[0] == "forming" and all(deaf)


def test_a_pod_whose_rank_has_gone_is_not_ready(tmp_path: Path) -> None:
    def rank(state: str = "ready", code: int | None = None) -> Any:
        return SimpleNamespace(state=state, code=code)

    with socket.create_server(("127.0.0.1", 0)) as health:
        pod = Supervisor(PodConfig(secret="s" * 32), tmp_path, health)
        assert not pod.ready
        for ranks, ready in [
            ([rank(), rank()], True),
            ([rank(), rank("loading")], False),
            ([rank(), rank(code=1)], False),  # what it said last is still known
            ([rank(code=0)], False),
        ]:
            pod._ranks = ranks
            assert pod.ready is ready


async def test_an_exit_may_be_asked_for_again() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    assert await wait_for_exit(process) == 7
    assert await wait_for_exit(process) == 7


def test_a_link_that_a_frame_closed_gives_no_more() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, "a peer")
    theirs.sendall(encode(FrameKind.BYE, 1) + encode(FrameKind.BYE, 2))
    seen = []
    with contextlib.suppress(LinkClosed):
        for frame in link.frames(0.0):
            seen.append(frame.body)
            link.close()
    assert seen == [1]
    theirs.close()


def entry(stop_id: str) -> dict[str, Any]:
    return {"stop_id": stop_id, "reason": "client_cancel", "tenant": "t", "traceparent": ""}


def stops_of(seen: "OrderedDict[str, str]") -> FrontStops:
    return FrontStops("g", lambda receipt: seen.update({receipt["stop_id"]: receipt["status"]}))


def test_the_end_of_an_epoch_resolves_its_stops_in_two_steps() -> None:
    seen: OrderedDict[str, str] = OrderedDict()
    stops = stops_of(seen)
    assert stops.passed(entry("a"), sent=True)
    stops.epoch_ended(7)
    assert seen == {"a": "stopped"}
    stops.epoch_formed()
    assert seen == {"a": "reclaimed"}
    assert not stops.passed(entry("a"), sent=True), "it is resolved, and said again"


def test_a_stop_that_came_without_an_epoch_goes_to_the_next() -> None:
    seen: OrderedDict[str, str] = OrderedDict()
    stops = stops_of(seen)
    stops.epoch_ended(7)
    assert stops.passed(entry("b"), sent=False)
    stops.epoch_formed()
    assert stops.take_held() == [entry("b")]
    assert not seen


def test_a_broken_link_is_not_the_end_of_an_epoch() -> None:
    """The processes live on: nothing is proved reclaimed, the leader is asked again."""
    seen: OrderedDict[str, str] = OrderedDict()
    stops = stops_of(seen)
    stops.passed(entry("a"), sent=True)
    stops.epoch_ended(7)
    stops.epoch_goes_on()
    assert stops.take_held() == [entry("a")]
    assert seen == {"a": "stopped"}
    stops.epoch_formed()
    assert seen == {"a": "stopped"}


def test_a_taken_probe_port_is_one_sentence_and_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {
            **os.environ,
            "STOPWAY_SECRET": "s" * 32,
            "STOPWAY_HEALTH_PORT": str(taken.getsockname()[1]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "stopway_engine.supervise"],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == EXIT_CONFIG
    assert "choose another STOPWAY_HEALTH_PORT" in done.stderr
    assert len(done.stderr.splitlines()) == 1
