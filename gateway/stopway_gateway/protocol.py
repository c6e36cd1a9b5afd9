"""The HTTP connection: bounds that only it can keep, and its own errors in the API's shape."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from stopway_gateway.errors import dumps, error_json

HEADER_BYTES_MAX = 64 * 1024
_HEADERS_TIMEOUT_S = 30.0
_SEND_BUFFER_BYTES = 256 * 1024
_PIPELINE_MAX = 8
_PROBES = 3
_LINGER_S = 1.0


def connection_class(user_timeout_s: float) -> type[HttpToolsProtocol]:
    """The protocol class, with its TCP user timeout."""

    class Connection(_Connection):
        USER_TIMEOUT_S = user_timeout_s

    return Connection


class _Connection(HttpToolsProtocol):
    USER_TIMEOUT_S: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True
        self._refused = False
        self._served: RequestResponseCycle | None = None
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            self._bound_silence(sock)
        self._headers_timer = self.loop.call_later(_HEADERS_TIMEOUT_S, self._headers_late)

    def _bound_silence(self, sock: socket.socket) -> None:
        """Have the kernel give up on a client that is gone without a word, or that doesn't read.

        Sent data that is not acknowledged for ``USER_TIMEOUT_S`` ends the connection. While there
        is nothing to send, probes begin after half of that time; the kernel ends the connection
        with the first one that is due once nothing has come for all of it: so within 7/6 of it,
        and a second or two for the rounding of short ones.
        """
        whole = self.USER_TIMEOUT_S
        tcp = socket.IPPROTO_TCP
        sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(whole * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, round(whole / 2)))
        sock.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, round(whole / 6)))
        sock.setsockopt(tcp, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_headers_timer()
        super().connection_lost(exc)
        # uvicorn tells the newest request, which may only wait in the pipeline behind this one.
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True
            served.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > HEADER_BYTES_MAX:
            self._refuse(431, f"The headers are larger than {HEADER_BYTES_MAX} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self.scope["stopway.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        self._cancel_headers_timer()
        super().on_headers_complete()
        # uvicorn stops reading while a request is pipelined behind another, and would then not
        # notice that the client left. Read on; what may wait is bounded here and in on_body.
        if self.pipeline:
            self.flow.resume_reading()
            if len(self.pipeline) > _PIPELINE_MAX:
                self.transport.abort()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        if self._refused or self.transport.is_closing():
            return
        # In the middle of another answer there is no place for this one.
        if (
            self.cycle is None
            or self.cycle.response_complete
            or not (self.cycle.response_started or self.pipeline)
        ):
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # its own answer, if it comes to one, goes nowhere
                self.cycle.message_event.set()
            body = dumps(error_json(status, message))
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
                + str(len(body)).encode()
                + b"\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head + body)
            # Closing on a client that is still sending would reset the connection, and the answer
            # would be lost: end our half, and drop what comes for a moment.
            self._refused = True
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _headers_late(self) -> None:
        if self.cycle is None:
            self._refuse(408, "No request came in time.")

    def _cancel_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
