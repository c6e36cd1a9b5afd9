"""How a front ends: it reads its leader to the end, and sends on what it has, before it closes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stopway_cli.stack import ports
from stopway_core.wire import FrameKind, encode
from stopway_engine.front import __main__ as front
from stopway_engine.front.hub import Hub
from stopway_engine.front.session import Session

from .front_ends import SECRET, Engine, FakeSession
from .signals import ignores_sigint

HELLO = {"epoch": 1, "max_model_len": 100, "total_blocks": 9, "draining": False}


def said(**body: Any) -> bytes:
    return encode(FrameKind.FRONT_OUT, body, epoch=1, turn=1)


class SlowSession(FakeSession):
    """Its gateway has not taken everything until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def flushed(self) -> None:
        await self.may_end.wait()


async def until_settled() -> None:
    """Until what can happen without anybody's doing has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_front_that_is_told_to_end_passes_the_last_words_on_first(hub: Hub) -> None:
    session, engine = SlowSession(), Engine(hub)
    hub.open(session)
    engine.connect(1)
    server: Any = SimpleNamespace(should_exit=False)
    told = asyncio.Event()
    ending = asyncio.create_task(front.end_after_last_words(told, hub, server))
    told.set()
    await until_settled()
    assert not server.should_exit  # its leader may have said more than was read
    engine.leave()
    await until_settled()
    assert not server.should_exit  # and the session has been sent less than was said
    session.may_end.set()
    await ending
    assert server.should_exit


@pytest.mark.parametrize("who", ["leader", "gateway"])
async def test_nobody_who_stands_still_keeps_a_front(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], who: str
) -> None:
    monkeypatch.setattr(front, "LAST_WORDS_S", 0.01)
    session = FakeSession() if who == "leader" else SlowSession()
    hub.open(session)
    if who == "leader":
        Engine(hub).connect(1)
    server: Any = SimpleNamespace(should_exit=False)
    told = asyncio.Event()
    told.set()
    await front.end_after_last_words(told, hub, server)
    assert server.should_exit and "last words" in capsys.readouterr().err


async def test_a_front_closes_its_end_when_it_has_handled_all_that_the_leader_said(
    hub: Hub, session: FakeSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "front.sock")
    server = await asyncio.start_unix_server(lambda r, w: front.engine_connection(hub, r, w), path)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(said(hello=HELLO, mode="running"))
    receipts = [{"stop_id": str(n), "status": "reclaimed", "text": "x" * 1000} for n in range(500)]
    writer.writelines(said(receipts=[receipt]) for receipt in receipts)
    writer.write_eof()
    async with asyncio.timeout(30):
        await reader.read()  # to its end
    assert [message["receipt"] for message in session.of("receipt")] == receipts
    assert session.of("epoch")
    writer.close()
    server.close()


async def test_a_session_is_flushed_when_its_socket_has_taken_everything() -> None:
    class Socket:
        def __init__(self) -> None:
            self.may_take = asyncio.Semaphore(0)
            self.taken: list[str] = []

        async def send_text(self, text: str) -> None:
            await self.may_take.acquire()
            if text == '{"n":2}':
                raise OSError("it has gone")
            self.taken.append(text)

    sock: Any = Socket()
    session = Session("gw", sock)
    async with asyncio.timeout(30):
        await session.flushed()  # there is nothing
        sender = asyncio.create_task(session.run())
        session.send({"n": 0})
        session.send({"n": 1})
        flushed = asyncio.create_task(session.flushed())
        sock.may_take.release()
        await until_settled()
        assert len(sock.taken) == 1 and not flushed.done()
        sock.may_take.release()
        await flushed
        assert sock.taken == ['{"n":0}', '{"n":1}']
        session.send({"n": 2})
        flushed = asyncio.create_task(session.flushed())
        await until_settled()
        assert not flushed.done()
        sock.may_take.release()
        await flushed  # nobody is there to take it
        session.send({"n": 3})
        await session.flushed()
        await sender


@pytest.mark.model
@pytest.mark.parametrize("how", ["SIGTERM", "pipe"])
async def test_a_front_is_deaf_to_a_terminal_and_ends_with_its_supervise(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "front.sock"
    (port,) = ports.free_ports(1, "127.0.0.1")
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "stopway_engine.front"],
        env={
            **os.environ,
            "STOPWAY_SECRET": SECRET,
            "STOPWAY_BIND_HOST": "127.0.0.1",
            "STOPWAY_FRONT_PORT": str(port),
            "STOPWAY_FRONT_SOCKET": str(path),
            "STOPWAY_PARENT_FD": str(read_end),
        },
        pass_fds=(read_end,),
    )
    os.close(read_end)
    try:
        async with asyncio.timeout(120):
            while not path.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        assert ignores_sigint(process.pid)
        if how == "SIGTERM":
            process.terminate()
        else:
            os.close(write_end)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()
        if how == "SIGTERM":
            os.close(write_end)
