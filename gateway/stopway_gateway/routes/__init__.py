"""Every route of the gateway."""

from __future__ import annotations

from starlette.routing import BaseRoute

from stopway_gateway.gateway import Gateway
from stopway_gateway.routes import (
    debug,
    documents,
    generate,
    groups,
    health,
    models,
    requests,
    stops,
)


def all_routes(gateway: Gateway) -> list[BaseRoute]:
    """All of them, for one gateway."""
    return [
        route
        for module in (generate, models, requests, stops, groups, health, debug, documents)
        for route in module.routes(gateway)
    ]
