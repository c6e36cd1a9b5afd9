"""An HTTP server inside a process that has signal handling of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers; end it with ``should_exit`` or by cancelling."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="websockets-sansio",
                ws_max_size=32 * 1024 * 1024,
                ws_ping_interval=5.0,
                ws_ping_timeout=10.0,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay with the process."""
        yield
