"""uvicorn, with our connection class, and with a shutdown that drains before it closes."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from stopway_gateway.app import App
from stopway_gateway.config import ConfigError, Settings
from stopway_gateway.errors import Message, Receive, Scope, Send
from stopway_gateway.protocol import connection_class

_CLOSE_S = 2
_BACKLOG = 4096


def listen(settings: Settings) -> socket.socket:
    """The socket to serve on. Raises ``ConfigError`` when there can't be one."""
    host, port = settings.bind_host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror}; "
            "set STOPWAY_PORT or STOPWAY_BIND_HOST to what is free"
        ) from None


class ClosingWhileDraining:
    """An app whose answers, once its gateway drains, are the last ones on their connections.

    A client that is refused sends its request again down the connection that it has: kept open,
    that leads here until the end of the drain, however many other gateways there are.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope; a response that has begun goes on as it is."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._app.gateway.draining:
                headers = [pair for pair in message["headers"] if pair[0] != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, send_closing)


class GatewayServer(uvicorn.Server):
    """On SIGTERM it goes on listening (``/readyz`` says 503) until it is drained; then exits."""

    def __init__(self, app: App) -> None:
        settings = app.gateway.settings
        super().__init__(
            uvicorn.Config(
                ClosingWhileDraining(app),
                host=settings.bind_host,
                port=settings.port,
                http=connection_class(settings.tcp_user_timeout_s),
                ws="none",
                lifespan="on",
                log_level=settings.log_level,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_S,
                backlog=_BACKLOG,
            )
        )
        self._app = app
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not wait."""
        if self._drain is not None or self._app.gateway.draining:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self._app.gateway.draining = True
        # Signals come between bytecodes of the main thread: only the loop may start a task.
        asyncio.get_running_loop().call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Drain, then close."""
        self._drain = asyncio.create_task(self._drain_and_exit(), name="drain")

    async def _drain_and_exit(self) -> None:
        await self._app.gateway.drain()
        self.should_exit = True

    @property
    def bound_port(self) -> int:
        """The port that it listens on, once started."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port
