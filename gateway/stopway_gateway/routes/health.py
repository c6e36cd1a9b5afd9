"""``/healthz``, ``/readyz``, ``/metrics``: open to all, they say nothing of any request."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import answer


def routes(gateway: Gateway) -> list[BaseRoute]:
    """For probes and for Prometheus."""

    async def healthz(request: HttpRequest) -> Response:
        return answer({"status": "ok"})

    async def readyz(request: HttpRequest) -> Response:
        groups = [session.group for session in gateway.registry.ready()]
        if gateway.draining:
            return answer({"status": "draining", "groups": groups}, 503)
        return answer(
            {"status": "ready" if groups else "no group", "groups": groups}, 200 if groups else 503
        )

    async def metrics(request: HttpRequest) -> Response:
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
