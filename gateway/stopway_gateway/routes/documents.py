"""``/openapi.json`` and ``/docs``: the API, described by the routes themselves."""

from __future__ import annotations

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import DocumentedRoute, answer, refusals

_OPENAPI = "/openapi.json"


async def openapi(request: HttpRequest) -> Response:
    """This document."""
    return answer(request.app.openapi())


async def docs(request: HttpRequest) -> Response:
    """A page to read this document with (its scripts come from a CDN)."""
    # The document is in the page: a browser would ask for it again without the key.
    return get_swagger_ui_html(
        openapi_url=_OPENAPI,
        title=request.app.title,
        swagger_ui_parameters={"spec": request.app.openapi()},
    )


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Behind a key, as nearly everything."""
    return [
        DocumentedRoute(
            "GET",
            _OPENAPI,
            openapi,
            tag="documents",
            shape=None,
            success="An OpenAPI 3.1 document.",
            responses=refusals(401),
        ),
        DocumentedRoute(
            "GET",
            "/docs",
            docs,
            tag="documents",
            shape=None,
            success="HTML.",
            responses=refusals(401),
            response_class=HTMLResponse,
        ),
    ]
