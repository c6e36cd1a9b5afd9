"""What several routes need: who asks, the body, query parameters, JSON answers."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from stopway_gateway.auth import Principal
from stopway_gateway.config import Settings
from stopway_gateway.errors import ApiError, Scope, Send, dumps, start_message
from stopway_gateway.limits import parse_json
from stopway_gateway.watcher import Watcher


def principal_of(request: HttpRequest) -> Principal:
    """Who asks."""
    principal: Principal = request.scope["state"]["principal"]
    return principal


def answer(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(dumps(value), status_code=status, media_type="application/json")


async def body_of(scope: Scope, watcher: Watcher, send: Send, settings: Settings) -> bytes | None:
    """The body, or None when it was refused and the refusal is sent.

    A client that is still sending would not see an answer on a connection that is closed under
    it, so the rest of the body is read (and dropped) for a moment after the answer.
    """
    declared = dict(scope["headers"]).get(b"content-length")
    try:
        return await watcher.body(declared, settings.body_bytes_max, settings.body_timeout_s)
    except ApiError as error:
        text = dumps(error.to_json())
        headers = {"connection": "close"}
        await send(start_message(error.status, "application/json", len(text), headers))
        await send({"type": "http.response.body", "body": text, "more_body": True})
        if error.status == 413:
            await watcher.linger()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None


async def json_of(request: HttpRequest, settings: Settings) -> dict[str, Any]:
    """The JSON object in a small request's body. Raises a 4xx."""
    declared = request.headers.get("content-length")
    watcher = Watcher(request.receive)
    body = await watcher.body(
        declared.encode() if declared else None, settings.body_bytes_max, settings.body_timeout_s
    )
    return parse_json(body)


def number(value: Any, name: str, default: float, maximum: float) -> float:
    """A number of seconds, from a query or a body. Raises a 400."""
    if value is None:
        return default
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= maximum:
        message = f"{name}: a number of seconds from 0 to {maximum:g}"
        raise ApiError(400, message, code="invalid_value", param=name)
    return seconds
