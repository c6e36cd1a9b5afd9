"""Errors in OpenAI's shape, and the plain ASGI responses that carry them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told: a status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def to_json(self) -> dict[str, Any]:
        """The body: ``{"error": {...}}``."""
        return error_json(self.status, self.message, code=self.code, param=self.param)


class ClientGoneError(Exception):
    """The client left before its request was whole: nobody is there to be answered."""


def error_json(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; ``message`` is cut to 1,000 characters."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message[:1000], "type": kind, "param": param, "code": code}}


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; text that UTF-8 can't carry is replaced, never an error."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


async def send_json(
    send: Send, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    """Answer with one JSON document."""
    body = dumps(value)
    await send(start_message(status, "application/json", len(body), headers))
    await send({"type": "http.response.body", "body": body, "more_body": False})


def start_message(
    status: int, content_type: str, length: int | None, headers: dict[str, str] | None = None
) -> Message:
    """The ASGI message that begins a response; ``length`` None is a stream."""
    pairs = [(b"content-type", content_type.encode())]
    if length is not None:
        pairs.append((b"content-length", str(length).encode()))
    for name, value in (headers or {}).items():
        pairs.append((name.lower().encode("latin-1"), value.encode("latin-1")))
    return {"type": "http.response.start", "status": status, "headers": pairs}
