"""``/healthz``, ``/readyz``, ``/metrics``: open to all, they say nothing of any request."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from stopway_gateway.answers import HealthAnswer, ReadyAnswer
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import DocumentedRoute, answer

_NO_KEY: dict[str, Any] = {"security": []}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """For probes and for Prometheus."""

    async def healthz() -> Response:
        """200 while the process lives."""
        return answer({"status": "ok"})

    async def readyz() -> Response:
        """200 when a group can serve; 503 otherwise, and while draining."""
        groups = [session.group for session in gateway.registry.ready()]
        if gateway.draining:
            return answer({"status": "draining", "groups": groups}, 503)
        return answer(
            {"status": "ready" if groups else "no group", "groups": groups}, 200 if groups else 503
        )

    async def metrics() -> Response:
        """For Prometheus: one series for each group, never for each rank."""
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    unready: dict[int | str, dict[str, Any]] = {
        503: {"model": ReadyAnswer, "description": "No group can serve, or it drains."}
    }
    return [
        DocumentedRoute(
            "GET",
            "/healthz",
            healthz,
            tag="operators",
            shape=HealthAnswer,
            success="It lives.",
            responses={},
            extra=_NO_KEY,
        ),
        DocumentedRoute(
            "GET",
            "/readyz",
            readyz,
            tag="operators",
            shape=ReadyAnswer,
            success="A group can serve.",
            responses=unready,
            extra=_NO_KEY,
        ),
        DocumentedRoute(
            "GET",
            "/metrics",
            metrics,
            tag="operators",
            shape=None,
            success="Prometheus text.",
            responses={},
            extra=_NO_KEY,
            response_class=PlainTextResponse,
        ),
    ]
