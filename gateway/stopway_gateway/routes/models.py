"""``/v1/models``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from starlette.responses import Response
from starlette.routing import BaseRoute

from stopway_gateway.answers import ModelAnswer, ModelList
from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import DocumentedRoute, answer, refusals

ModelId = Annotated[str, Path(description="The id of a model, as the list has it.")]


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The one model that a service has."""

    def shown() -> dict[str, Any]:
        lengths = [s.hello["max_model_len"] for s in gateway.registry.sessions() if s.hello]
        return {
            "id": gateway.settings.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "stopway",
            "max_model_len": min(lengths) if lengths else None,
        }

    async def list_models() -> Response:
        """The one model that is served."""
        return answer({"object": "list", "data": [shown()]})

    async def get_model(model: ModelId) -> Response:
        """That model."""
        if model != gateway.settings.model_name:
            message = f"The model {model[:100]!r} does not exist."
            raise ApiError(404, message, code="model_not_found", param="model")
        return answer(shown())

    return [
        DocumentedRoute(
            "GET",
            "/v1/models",
            list_models,
            tag="completions",
            shape=ModelList,
            success="A list of one.",
            responses=refusals(401),
        ),
        DocumentedRoute(
            "GET",
            "/v1/models/{model:path}",
            get_model,
            tag="completions",
            shape=ModelAnswer,
            success="The model.",
            responses=refusals(401, 404),
        ),
    ]
