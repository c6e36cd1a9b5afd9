"""``/debug/*``, for admins: what the leaders and the pods keep."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import httpx
from fastapi import Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from stopway_gateway.answers import LedgerAnswer, TraceAnswer
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import DocumentedRoute, answer, need_admin, refusals
from stopway_telemetry import load_spans

TraceId = Annotated[str, Query(pattern="^[0-9a-f]{32}$", description="32 hex digits.")]


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Proxied to every leader, with the service's secret."""

    async def get_ledger(request: HttpRequest) -> Response:
        """The ledger of each group's leader: what holds which blocks (admins)."""
        need_admin(request)
        replies = await _ask_leaders(gateway, "/internal/v1/ledger", {})
        return answer({"groups": [{"group": group, **reply} for group, reply in replies]})

    async def get_trace(request: HttpRequest, trace_id: TraceId) -> Response:
        """The spans of a trace that the gateway and the leaders keep (admins)."""
        need_admin(request)
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
        DocumentedRoute(
            "GET",
            "/debug/ledger",
            get_ledger,
            tag="operators",
            shape=LedgerAnswer,
            success="The ledgers.",
            responses=refusals(401, 403),
        ),
        DocumentedRoute(
            "GET",
            "/debug/trace",
            get_trace,
            tag="operators",
            shape=TraceAnswer,
            success="The spans.",
            responses=refusals(400, 401, 403),
        ),
    ]


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
