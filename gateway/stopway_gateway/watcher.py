"""Who owns ``receive``: first the body is read through it, then a disconnect is waited for.

Nothing else may call ``receive``, so nothing can steal a part of the body or the one message that
says that the client left. It works alike in every phase of a request, streaming or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stopway_gateway.errors import ApiError, ClientGoneError, Receive

_LINGER_S = 2.0


class Watcher:
    """Reads one request's body, then watches its client until ``close``."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._whole = False
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    async def body(self, declared: bytes | None, bytes_max: int, timeout_s: float) -> bytes:
        """The whole body. Raises a 413, a 408, or ``ClientGoneError``."""
        too_large = ApiError(
            413, f"The body is larger than {bytes_max} bytes.", code="body_too_large"
        )
        if declared is not None and declared.isdigit() and int(declared[:20]) > bytes_max:
            raise too_large
        parts = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._whole:
                    parts += await self._next()
                    if len(parts) > bytes_max:
                        raise too_large
        except TimeoutError:
            message = f"The body was not complete after {timeout_s:g} s: check Content-Length."
            raise ApiError(408, message, code="body_timeout") from None
        return bytes(parts)

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGoneError
        self._whole = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def linger(self) -> None:
        """Read on, keeping nothing, so that a client still sending gets to see its answer."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self._whole:
                    await self._next()
        except (TimeoutError, ClientGoneError):
            return

    def start(self, on_gone: Callable[[], None]) -> None:
        """From now on, call ``on_gone`` once when the client leaves."""
        self._task = asyncio.create_task(self._watch(on_gone), name="watch-client")

    async def _watch(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        on_gone()

    def close(self) -> None:
        """Watch no longer: the answer is complete, so its connection's end means nothing."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
