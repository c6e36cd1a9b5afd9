"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import answer


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The one model that a service has."""

    def model() -> dict[str, Any]:
        lengths = [s.hello["max_model_len"] for s in gateway.registry.sessions() if s.hello]
        return {
            "id": gateway.settings.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "stopway",
            "max_model_len": min(lengths) if lengths else None,
        }

    async def list_models(request: HttpRequest) -> Response:
        return answer({"object": "list", "data": [model()]})

    async def get_model(request: HttpRequest) -> Response:
        wanted = request.path_params["model"]
        if wanted != gateway.settings.model_name:
            message = f"The model {wanted[:100]!r} does not exist."
            raise ApiError(404, message, code="model_not_found", param="model")
        return answer(model())

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
    ]
