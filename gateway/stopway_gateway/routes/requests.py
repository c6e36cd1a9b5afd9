"""``/v1/requests``: what runs, what ran, and the cancel of one."""

from __future__ import annotations

from itertools import islice

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stopway_core import names
from stopway_core.types import Reason, Target
from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import answer, principal_of
from stopway_gateway.routes.stops import Wait, conclude

_LIST_MAX = 1000


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Listing, reading, cancelling."""

    async def list_requests(request: HttpRequest) -> Response:
        gateway.table.trim()
        limit = request.query_params.get("limit", "100")
        if not limit.isdigit() or not 0 < int(limit[:9]) <= _LIST_MAX:
            raise ApiError(
                400, f"limit: from 1 to {_LIST_MAX}", code="invalid_value", param="limit"
            )
        status = request.query_params.get("status")
        shown = (item.to_json() for item in gateway.table.visible(principal_of(request)))
        chosen = (item for item in shown if status is None or item["status"] == status)
        return answer({"object": "list", "data": list(islice(chosen, int(limit)))})

    async def get_request(request: HttpRequest) -> Response:
        gateway.table.trim()
        uid = request.path_params["uid"]
        found = gateway.table.get(uid, principal_of(request))
        if found is None:
            raise unknown(uid)
        return answer(found.to_json())

    async def cancel(request: HttpRequest) -> Response:
        uid = request.path_params["uid"]
        principal = principal_of(request)
        wait = Wait.parse(request.query_params, gateway.settings.wait_s_max)
        gateway.table.trim()
        here = gateway.table.get(uid, principal) is not None
        if not names.valid_id(uid) or (not here and gateway.table.mine(uid)):
            raise unknown(uid)
        record = gateway.stops.issue(Target(uids=(uid,)), Reason.CLIENT_CANCEL, principal)
        return await conclude(gateway, record, wait)

    return [
        Route("/v1/requests", list_requests, methods=["GET"]),
        Route("/v1/requests/{uid}", get_request, methods=["GET"]),
        Route("/v1/requests/{uid}/cancel", cancel, methods=["POST"]),
    ]


def unknown(uid: str) -> ApiError:
    """The one answer for an id that does not exist and for another tenant's."""
    return ApiError(404, f"There is no request {uid[:128]!r}.", code="request_not_found")
