"""The child processes of a pod: ranks with a socket to each, and the front."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from stopway_core.wire import Decoder, Frame, FrameKind, WireError, encode

UNSENT_MAX = 64 * 1024 * 1024


class RankProcess:
    """One life of one rank. ``on_frame`` gets what it sends; ``code`` is set when it has gone."""

    def __init__(
        self, rank: int, env: dict[str, str], on_frame: Callable[[RankProcess, Frame], None]
    ) -> None:
        self.rank = rank
        self.state = "starting"
        self.epoch = 0
        self.fatal = ""
        self.heard_at = time.monotonic()
        self.code: int | None = None
        self._on_frame = on_frame
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._sock = ours
        self._unsent = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stopway_engine.rank"],
            env={**env, "STOPWAY_RANK": str(rank), "STOPWAY_POD_FD": str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self) -> int:
        """Read what it sends until it has gone; returns its exit code (negative: a signal)."""
        loop = asyncio.get_running_loop()
        decoder = Decoder()
        with contextlib.suppress(OSError, WireError):
            while data := await loop.sock_recv(self._sock, 1 << 18):
                self.heard_at = time.monotonic()
                for frame in decoder.feed(data):
                    self._on_frame(self, frame)
        loop.remove_writer(self._sock)
        self._sock.close()
        self.code = await wait_for_exit(self._process)
        return self.code

    def send(self, body: dict[str, Any]) -> None:
        """Tell the rank something, whole frames in order; one that never reads is ended."""
        if self._sock.fileno() < 0:
            return
        self._unsent += encode(FrameKind.POD_IN, body)
        if len(self._unsent) > UNSENT_MAX:
            self.kill()
            return
        self._flush()

    def drain(self) -> None:
        """Tell the rank to end what it serves and to leave.

        The word is read by a rank that has met its group; the signal ends one that has not, which
        is deaf to words (it imports, or waits for the others), and is ignored by one that has.
        """
        self.send({"drain": True})
        self._signal(signal.SIGTERM)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._unsent.clear()  # it has gone: ``run`` sees that, too
        loop.remove_writer(self._sock)

    def kill(self) -> None:
        """End it at once (a stopped process, too)."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class FrontProcess:
    """One life of the front. It ends when the pipe that it was given is closed."""

    def __init__(self, env: dict[str, str]) -> None:
        read_end, self._write_end = os.pipe()
        os.set_inheritable(read_end, True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stopway_engine.front"],
            env={**env, "STOPWAY_PARENT_FD": str(read_end)},
            pass_fds=(read_end,),
            stdin=subprocess.DEVNULL,
        )
        os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self) -> int:
        """Wait until it has gone; returns its exit code."""
        code = await wait_for_exit(self._process)
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        return code

    def stop(self) -> None:
        """Ask it to end, as a closed pipe does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a child, without blocking the loop or polling."""
    if process.poll() is not None:
        return process.wait()  # reaped before: its pid may be somebody else's
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(process.pid)
    gone = asyncio.Event()
    loop.add_reader(fd, gone.set)
    try:
        if process.poll() is None:
            await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()
