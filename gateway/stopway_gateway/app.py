"""The FastAPI application: a key for everything, errors in OpenAI's shape, documented routes.

Middlewares are plain ASGI: what a generating route receives and sends passes through untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from stopway_gateway.config import Settings
from stopway_gateway.errors import (
    ApiError,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    dumps,
    send_json,
)
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes import all_routes
from stopway_gateway.schemas import BODIES, invalid

_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_DESCRIPTION = """OpenAI's API for completions, and one of its own for stops.

A key belongs to a tenant; what belongs to another tenant does not exist for it. Every failure is
`{"error": {"message", "type", "param", "code"}}`."""


class App(FastAPI):
    """The application of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        super().__init__(
            title="Stopway",
            description=_DESCRIPTION,
            version=_version(),
            routes=all_routes(gateway),
            openapi_url=None,  # these pages are routes of ours, documented as the others
            redirect_slashes=False,
            lifespan=_lifespan,
            middleware=[Middleware(KeyGate, gateway=gateway)],
            exception_handlers={
                ApiError: _on_api_error,
                HTTPException: _on_http_error,
                RequestValidationError: _on_invalid,
                ClientGoneError: _on_client_gone,
                Exception: _on_failure,
            },
            telemetry={"tracing": False, "metrics": False, "logs": False},  # we have our own
        )

    def openapi(self) -> dict[str, Any]:
        """The document: FastAPI's, with the bodies that the routes read themselves, and the key."""
        if self.openapi_schema is None:
            document = super().openapi()
            _, bodies = models_json_schema(
                [(model, "validation") for model in BODIES],
                ref_template="#/components/schemas/{model}",
            )
            parts = document.setdefault("components", {})
            parts.setdefault("schemas", {}).update(bodies["$defs"])
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            self.openapi_schema = document
        return self.openapi_schema


class KeyGate:
    """Deny by default: all but the probes needs a key, whether there is such a route or not."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._keys = gateway.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope, with its ``principal`` in the scope's state."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            try:
                principal = self._keys.authenticate(scope["headers"])
            except ApiError as error:
                await send_json(send, error.status, error.to_json(), error.headers)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def _lifespan(app: App) -> AsyncIterator[None]:
    await app.gateway.start()
    try:
        yield
    finally:
        await app.gateway.close()


# --- errors -----------------------------------------------------------------------------------


async def _on_api_error(_: HttpRequest, error: ApiError) -> Response:
    return Response(
        dumps(error.to_json()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _on_http_error(request: HttpRequest, error: HTTPException) -> Response:
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"There is no {request.method} {request.url.path[:100]}.", "not_found"
    headers = dict(error.headers or {})
    return await _on_api_error(
        request, ApiError(error.status_code, message, code=code, headers=headers)
    )


async def _on_invalid(request: HttpRequest, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    return await _on_api_error(request, invalid(str(first["loc"][-1])[:100], first["msg"]))


async def _on_client_gone(_: HttpRequest, error: ClientGoneError) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _on_failure(request: HttpRequest, error: Exception) -> Response:
    # Starlette raises it again after this answer, and the server logs it.
    failure = ApiError(500, "The gateway failed on this request.", code="internal_error")
    return await _on_api_error(request, failure)


def _version() -> str:
    try:
        return metadata.version("stopway")
    except metadata.PackageNotFoundError:
        return "0"


def create_app(settings: Settings | None = None) -> App:
    """The application; the settings come from the environment unless given."""
    return App(Gateway(settings or Settings()))
