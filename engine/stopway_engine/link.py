"""A framed, non-blocking socket for a select loop: bytes are queued, frames come out."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Iterator

from stopway_core.wire import Decoder, Frame, WireError

_READ = 1 << 18
QUEUE_MAX = 256 * 1024 * 1024


class LinkClosed(Exception):
    """The other side is gone, or sent what is not a frame."""


class Link:
    """One connection of a rank's control loop; never blocks, never reconnects."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A node that loses its power closes nothing: without these a peer waits for hours.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.sock = sock
        self.name = name
        self.closed = False
        self.heard_at = 0.0  # by the loop's monotonic clock
        self._decoder = Decoder()
        self._out: deque[memoryview] = deque()
        self._queued = 0
        self._finishing = False
        self._selector: selectors.BaseSelector | None = None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have ``selector`` say when there is something to read (and write, when needed)."""
        self._selector = selector
        selector.register(self.sock, selectors.EVENT_READ, self)

    def send(self, frame: bytes) -> None:
        """Queue a frame and send what the socket takes now. Raises ``LinkClosed``."""
        self._out.append(memoryview(frame))
        self._queued += len(frame)
        if self._queued > QUEUE_MAX:
            raise LinkClosed(f"{self.name} does not read: {self._queued} bytes are queued")
        if len(self._out) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it. Raises ``LinkClosed``."""
        try:
            while self._out:
                sent = self.sock.send(self._out[0])
                self._queued -= sent
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
            if self._finishing:
                self.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkClosed(f"{self.name}: {error.strerror or error}") from None
        if self._selector is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            if self._selector.get_key(self.sock).events != wanted:
                self._selector.modify(self.sock, wanted, self)

    def finish(self) -> None:
        """Nothing more is sent: behind what is queued the other side reads the end.

        What it says is still read, so that no write of its own fails and costs it what it has not
        read yet. That it has gone is found there, too.
        """
        self._finishing = True
        with contextlib.suppress(LinkClosed):
            self.flush()

    def frames(self, now: float) -> Iterator[Frame]:
        """Everything that has come. Raises ``LinkClosed`` after the last frame of a closed one."""
        closed = ""
        while True:
            try:
                data = self.sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError as error:
                closed = f"{self.name}: {error.strerror or error}"
                break
            if not data:
                closed = f"{self.name} closed its connection"
                break
            self.heard_at = now
            try:
                for frame in self._decoder.feed(data):
                    yield frame
                    if self.closed:  # by whoever took the frame
                        return
            except WireError as error:
                closed = f"{self.name}: {error}"
                break
            if len(data) < _READ:
                break
        if closed:
            raise LinkClosed(closed)

    def drain(self, timeout_s: float) -> None:
        """Block until everything queued is sent, or ``timeout_s`` is over; for a last word."""
        with contextlib.suppress(OSError):
            self.sock.settimeout(timeout_s)
            while self._out:
                self.sock.sendall(self._out.popleft())

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.sock)
            self._selector = None
        self.sock.close()
