"""The ASGI application: authentication and errors around a router. No other middleware."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Router

from stopway_gateway.config import Settings
from stopway_gateway.errors import (
    ApiError,
    ClientGoneError,
    Message,
    Receive,
    Scope,
    Send,
    send_json,
)
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes import all_routes

_LOG = logging.getLogger(__name__)
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


class App:
    """Deny by default, and whatever goes wrong is an error object."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._router = Router(
            all_routes(gateway), redirect_slashes=False, default=_not_found, lifespan=self._lifespan
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        await self.gateway.start()
        try:
            yield
        finally:
            await self.gateway.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        scope["app"] = self
        try:
            if scope["path"] not in _OPEN_PATHS:
                principal = self.gateway.keys.authenticate(scope["headers"])
                scope.setdefault("state", {})["principal"] = principal
            await self._router(scope, receive, watched_send)
        except ClientGoneError:
            return
        except Exception as error:
            if started:
                raise
            answer = _answer(error)
            await send_json(send, answer.status, answer.to_json(), answer.headers)


def _answer(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    _LOG.error("a request failed", exc_info=error)
    return ApiError(500, "The gateway failed on this request.", code="internal_error")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, f"There is no {scope['method']} {scope['path'][:100]}.", code="not_found")


def create_app(settings: Settings | None = None) -> App:
    """The application; the settings come from the environment unless given."""
    return App(Gateway(settings or Settings()))
