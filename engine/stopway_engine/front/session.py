"""One gateway's session: what is sent to it is queued, so that nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

QUEUE_BYTES_MAX = 64 * 1024 * 1024


class Session:
    """The sending half of a WebSocket, and the lease of the requests that came on it."""

    def __init__(self, gateway: str, socket: WebSocket) -> None:
        self.gateway = gateway
        # Another session of the same gateway is another lease.
        self.lease = f"{gateway}/{secrets.token_hex(4)}"
        self.lost = False
        self._socket = socket
        self._queue: deque[str] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is left to send, or nobody to send it
        self._idle.set()
        self._closing = False

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. A gateway that lets too much pile up has lost its session."""
        if self._closing:
            return
        text = json.dumps(message, separators=(",", ":"))
        self._queue.append(text)
        self._idle.clear()
        self._bytes += len(text)
        if self._bytes > QUEUE_BYTES_MAX:
            self.close()
        self._wake.set()

    def close(self) -> None:
        """End the session; its sender closes the socket."""
        self._closing = True
        self._wake.set()

    async def flushed(self) -> None:
        """Wait until the socket has taken all that is queued, or takes nothing any more."""
        await self._idle.wait()

    async def run(self) -> None:
        """Send what is queued until the session is closed or the socket breaks."""
        try:
            while not self._closing:
                while self._queue and not self._closing:
                    text = self._queue.popleft()
                    self._bytes -= len(text)
                    await self._socket.send_text(text)
                self._wake.clear()
                self._idle.set()
                if not self._queue and not self._closing:
                    await self._wake.wait()
            await self._socket.close(1008)
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass  # the receiving half sees it, too, and ends the lease
        finally:
            self._closing = True
            self._idle.set()
