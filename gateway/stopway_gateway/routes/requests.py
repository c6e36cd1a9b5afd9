"""``/v1/requests``: what runs, what ran, and the cancel of one."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from stopway_core import names
from stopway_core.types import Reason, Target
from stopway_gateway.answers import RequestAnswer, RequestList, StopAnswer
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import DocumentedRoute, answer, principal_of, refusals
from stopway_gateway.routes.stops import STOP_ANSWERS, STOP_CAME, conclude, unknown_request
from stopway_gateway.schemas import WAIT_S, WAIT_TEXT, WAIT_TIMEOUT_TEXT, WaitLevel

RequestId = Annotated[str, Path(description="The id of a request, as its answer has it.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
Status = Annotated[str | None, Query(description="Only those with this status.")]
Wait = Annotated[WaitLevel, Query(description=WAIT_TEXT)]
Timeout = Annotated[float, Query(ge=0, allow_inf_nan=False, description=WAIT_TIMEOUT_TEXT)]


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Listing, reading, cancelling."""

    async def list_requests(
        request: HttpRequest, limit: Limit = 100, status: Status = None
    ) -> Response:
        """The requests of this gateway that run, or ended in the last 10 minutes."""
        gateway.table.trim()
        shown = (item.to_json() for item in gateway.table.visible(principal_of(request)))
        chosen = (item for item in shown if status is None or item["status"] == status)
        return answer({"object": "list", "data": list(islice(chosen, limit))})

    async def get_request(request: HttpRequest, uid: RequestId) -> Response:
        """One request; its `stop_ids` lead to the receipts of its stops."""
        gateway.table.trim()
        found = gateway.table.get(uid, principal_of(request))
        if found is None:
            raise unknown_request(uid)
        return answer(found.to_json())

    async def cancel_request(
        request: HttpRequest, uid: RequestId, wait: Wait = "accepted", timeout: Timeout = WAIT_S
    ) -> Response:
        """Stop one request.

        Stopping twice, or after the end, succeeds and says which. Another gateway's request is
        looked for at all groups and gateways.
        """
        principal = principal_of(request)
        gateway.check_wait(timeout)
        gateway.table.trim()
        here = gateway.table.get(uid, principal) is not None
        if not names.valid_id(uid) or (not here and gateway.table.mine(uid)):
            raise unknown_request(uid)
        record = gateway.stops.issue(Target(uids=(uid,)), Reason.CLIENT_CANCEL, principal)
        return await conclude(gateway, record, wait, timeout)

    return [
        DocumentedRoute(
            "GET",
            "/v1/requests",
            list_requests,
            tag="requests",
            shape=RequestList,
            success="The requests, newest first.",
            responses=refusals(400, 401),
        ),
        DocumentedRoute(
            "GET",
            "/v1/requests/{uid}",
            get_request,
            tag="requests",
            shape=RequestAnswer,
            success="The request.",
            responses=refusals(401, 404),
        ),
        DocumentedRoute(
            "POST",
            "/v1/requests/{uid}/cancel",
            cancel_request,
            tag="requests",
            shape=StopAnswer,
            success=STOP_CAME,
            responses={**STOP_ANSWERS, **refusals(400, 401, 404)},
        ),
    ]
