"""``/debug/*``, for admins: what the leaders and the pods keep."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import answer, principal_of
from stopway_telemetry import load_spans

_HEX = frozenset("0123456789abcdef")


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Proxied to every leader, with the service's secret."""

    async def ledger(request: HttpRequest) -> Response:
        _need_admin(request)
        replies = await _ask_leaders(gateway, "/internal/v1/ledger", {})
        return answer({"groups": [{"group": group, **reply} for group, reply in replies]})

    async def trace(request: HttpRequest) -> Response:
        _need_admin(request)
        trace_id = request.query_params.get("trace_id", "")
        if len(trace_id) != 32 or set(trace_id) - _HEX:
            raise ApiError(400, "trace_id: 32 hex digits", code="invalid_value", param="trace_id")
        spans: dict[str, dict[str, Any]] = {}
        directory = gateway.settings.spans_dir
        if directory:
            for record in await asyncio.to_thread(load_spans, directory, trace_id):
                spans[record.span_id] = record.to_json()
        for _, reply in await _ask_leaders(gateway, "/internal/v1/trace", {"trace_id": trace_id}):
            for span in reply.get("spans") or []:
                spans[span["span_id"]] = span
        ordered = sorted(spans.values(), key=lambda span: span["start"])
        return answer({"trace_id": trace_id, "spans": ordered})

    return [
        Route("/debug/ledger", ledger, methods=["GET"]),
        Route("/debug/trace", trace, methods=["GET"]),
    ]


def _need_admin(request: HttpRequest) -> None:
    if not principal_of(request).admin:
        raise ApiError(403, "This is for admins.", code="forbidden")


async def _ask_leaders(
    gateway: Gateway, path: str, query: dict[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    sessions = gateway.registry.sessions()
    headers = {"Authorization": f"Bearer {gateway.settings.secret.get_secret_value()}"}
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, headers=headers) as client:

        async def ask(url: str) -> dict[str, Any]:
            try:
                reply = await client.get(f"{url}{path}", params=query)
                reply.raise_for_status()
                value = reply.json()
            except (httpx.HTTPError, ValueError) as error:
                return {"error": f"{type(error).__name__}: {error}"}
            return value if isinstance(value, dict) else {"ledger": value}

        replies = await asyncio.gather(*(ask(session.url) for session in sessions))
    return [(s.group or s.url, reply) for s, reply in zip(sessions, replies, strict=True)]
