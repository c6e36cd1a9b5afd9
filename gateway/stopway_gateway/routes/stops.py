"""``/v1/stops``: a stop of one, of many, of all, and its receipt."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from stopway_core import names
from stopway_core.types import Reason, StopStatus, Target
from stopway_gateway.answers import StopAnswer
from stopway_gateway.auth import Principal
from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import (
    DocumentedRoute,
    answer,
    body_docs,
    json_of,
    principal_of,
    refusals,
)
from stopway_gateway.schemas import StopBody, WaitLevel, invalid, validate
from stopway_gateway.stops import StopRecord

StopId = Annotated[str, Path(description="The id of a stop, as its answer has it.")]
STOP_CAME = "The stop has come as far as `wait` says."
STOP_ANSWERS: dict[int | str, dict[str, Any]] = {
    202: {
        "model": StopAnswer,
        "description": "The time ran out; `pending_on` says what remains, and the stop goes on.",
    }
}
_TARGETS = ("request_ids", "conversation", "tenant", "all")


async def conclude(
    gateway: Gateway, record: StopRecord, wait: WaitLevel, timeout_s: float
) -> Response:
    """Wait as asked, then answer: 200, 202 when the wait ran out, 404 for what nobody knows."""
    if not record.known and record.stop.target.uids:
        await record.wait_known(gateway.settings.unknown_wait_s)
    reached = await record.wait(StopStatus(wait), timeout_s)
    if record.resolved and not record.known and record.stop.target.uids:
        raise unknown_request(record.stop.target.uids[0])
    return answer(record.to_json(), 200 if reached else 202)


def unknown_request(uid: str, param: str | None = None) -> ApiError:
    """The one answer for an id that does not exist and for another tenant's."""
    message = f"There is no request {uid[: names.ID_MAX]!r}."
    return ApiError(404, message, code="request_not_found", param=param)


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Making a stop, and reading it."""

    async def make_stop(request: HttpRequest) -> Response:
        """Stop some requests, a conversation, a tenant, or all: exactly one of these.

        A key that is not an admin's reaches its own tenant only. A stop that matches nothing
        still takes effect at one turn of every group.
        """
        principal = principal_of(request)
        body = validate(StopBody, await json_of(request, gateway.settings))
        gateway.check_wait(body.timeout)
        target = _target(gateway, body, principal)
        reason = _reason(body, target, principal)
        gateway.table.trim()
        for uid in target.uids:
            if gateway.table.get(uid, principal) is None and gateway.table.mine(uid):
                raise unknown_request(uid, "request_ids")
        record = gateway.stops.issue(target, reason, principal)
        return await conclude(gateway, record, body.wait, body.timeout)

    async def get_stop(request: HttpRequest, stop_id: StopId) -> Response:
        """The receipt of a stop, as far as it has come; readable for 10 minutes."""
        record = gateway.stops.get(stop_id, principal_of(request))
        if record is None:
            message = f"There is no stop {stop_id[: names.ID_MAX]!r}."
            raise ApiError(404, message, code="stop_not_found")
        return answer(record.to_json())

    return [
        DocumentedRoute(
            "POST",
            "/v1/stops",
            make_stop,
            tag="stops",
            shape=StopAnswer,
            success=STOP_CAME,
            responses={**STOP_ANSWERS, **refusals(400, 401, 403, 404, 408, 413)},
            extra=body_docs(StopBody),
        ),
        DocumentedRoute(
            "GET",
            "/v1/stops/{stop_id}",
            get_stop,
            tag="stops",
            shape=StopAnswer,
            success="The stop.",
            responses=refusals(401, 404),
        ),
    ]


def _target(gateway: Gateway, body: StopBody, principal: Principal) -> Target:
    given = [name for name in _TARGETS if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(
            400, f"Exactly one of {', '.join(_TARGETS)} is needed.", code="invalid_target"
        )
    if body.request_ids is not None:
        most = gateway.settings.stop_request_ids_max
        if len(body.request_ids) > most:
            raise invalid("request_ids", f"at most {most} ids")
        return Target(uids=tuple(dict.fromkeys(body.request_ids)))
    if body.conversation is not None:
        return Target(conversation=body.conversation)
    if body.tenant is not None:
        if not principal.reaches(body.tenant):
            message = f"There is no tenant {body.tenant!r}."
            raise ApiError(404, message, code="tenant_not_found", param="tenant")
        return Target(tenant=body.tenant)
    return Target(everything=True)


def _reason(body: StopBody, target: Target, principal: Principal) -> Reason:
    if body.reason is None:
        broad = bool(target.tenant) or target.everything
        return Reason.ADMIN if principal.admin and broad else Reason.CLIENT_CANCEL
    if not principal.admin:
        raise ApiError(403, "Only an admin gives a reason.", code="forbidden", param="reason")
    return Reason(body.reason)
