"""What several routes need: their documentation, who asks, the body, JSON answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from stopway_gateway.answers import ErrorAnswer
from stopway_gateway.auth import Principal
from stopway_gateway.config import Settings
from stopway_gateway.errors import ApiError, Scope, Send, dumps, start_message
from stopway_gateway.limits import parse_json
from stopway_gateway.watcher import Watcher

_REFUSALS: dict[int | str, str] = {
    400: "The request is malformed; `param` names what is.",
    401: "There is no valid API key.",
    403: "This is for admins.",
    404: "It does not exist, or it is another tenant's.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    429: "Too many requests at once, or the queue deadline passed.",
    500: "The engine failed on this request.",
    503: "No group is ready, one was lost, or the server is shutting down.",
    504: "Another deadline passed.",
    "default": "Any other failure has this shape, too.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of the failures that a route can answer with, and of all others."""
    listed: list[int | str] = [*statuses, "default"]
    return {status: {"model": ErrorAnswer, "description": _REFUSALS[status]} for status in listed}


def body_docs(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The documentation of a body that the route reads itself; ``App.openapi`` has the schema."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


class DocumentedRoute(APIRoute):
    """A route whose documentation is its endpoint's docstring and parameters, and ``shape``."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        *,
        tag: str,
        shape: type[BaseModel] | None,
        success: str,
        responses: dict[int | str, dict[str, Any]],
        extra: dict[str, Any] | None = None,
        response_class: type[Response] = JSONResponse,
    ) -> None:
        super().__init__(
            path,
            endpoint,
            methods=[method],
            tags=[tag],
            response_model=shape,
            response_description=success,
            responses=responses,
            response_class=response_class,
            operation_id=endpoint.__name__,
            openapi_extra=extra,
        )


def principal_of(request: HttpRequest) -> Principal:
    """Who asks."""
    principal: Principal = request.scope["state"]["principal"]
    return principal


def need_admin(request: HttpRequest) -> None:
    """Raises a 403 for a key that is not an admin's."""
    if not principal_of(request).admin:
        raise ApiError(403, "This is for admins.", code="forbidden")


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


async def json_of(
    request: HttpRequest, settings: Settings, *, required: bool = True
) -> dict[str, Any]:
    """The JSON object in a small request's body; empty, if that may be left out. Raises a 4xx."""
    declared = request.headers.get("content-length")
    watcher = Watcher(request.receive)
    body = await watcher.body(
        declared.encode() if declared else None, settings.body_bytes_max, settings.body_timeout_s
    )
    return parse_json(body) if body or required else {}
