"""``/v1/stops``: a stop of one, of many, of all, and its receipt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from stopway_core import names
from stopway_core.types import Reason, StopStatus, Target
from stopway_gateway.auth import Principal
from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import answer, json_of, number, principal_of
from stopway_gateway.stops import StopRecord

_LEVELS = {
    "accepted": StopStatus.ACCEPTED,
    "stopped": StopStatus.STOPPED,
    "reclaimed": StopStatus.RECLAIMED,
}
_TARGETS = ("request_ids", "conversation", "tenant", "all")
_ADMIN_REASONS = (Reason.CLIENT_CANCEL, Reason.ADMIN, Reason.DRAIN)
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Wait:
    """How far to wait, and how long."""

    level: StopStatus
    timeout_s: float

    @classmethod
    def parse(cls, values: Mapping[str, Any], timeout_max_s: float) -> Wait:
        """From a query or a body. Raises a 400."""
        level = values.get("wait", "accepted")
        if not isinstance(level, str) or level not in _LEVELS:
            raise _invalid("wait", f"one of {', '.join(_LEVELS)}")
        return cls(
            _LEVELS[level], number(values.get("timeout"), "timeout", _TIMEOUT_S, timeout_max_s)
        )


async def conclude(gateway: Gateway, record: StopRecord, wait: Wait) -> Response:
    """Wait as asked, then answer: 200, 202 when the wait ran out, 404 for what nobody knows."""
    if not record.known and record.stop.target.uids:
        await record.wait_known(gateway.settings.unknown_wait_s)
        if not record.known and record.resolved:
            raise ApiError(404, "There is no such request.", code="request_not_found")
    reached = await record.wait(wait.level, wait.timeout_s)
    return answer(record.to_json(), 200 if reached else 202)


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Making a stop, and reading it."""

    async def make_stop(request: HttpRequest) -> Response:
        principal = principal_of(request)
        body = await json_of(request, gateway.settings)
        wait = Wait.parse(body, gateway.settings.wait_s_max)
        target = _target(gateway, body, principal)
        reason = _reason(body.get("reason"), target, principal)
        gateway.table.trim()
        for uid in target.uids:
            if gateway.table.get(uid, principal) is None and gateway.table.mine(uid):
                message = f"There is no request {uid!r}."
                raise ApiError(404, message, code="request_not_found", param="request_ids")
        return await conclude(gateway, gateway.stops.issue(target, reason, principal), wait)

    async def get_stop(request: HttpRequest) -> Response:
        stop_id = request.path_params["stop_id"]
        record = gateway.stops.get(stop_id, principal_of(request))
        if record is None:
            raise ApiError(404, f"There is no stop {stop_id[:128]!r}.", code="stop_not_found")
        return answer(record.to_json())

    return [
        Route("/v1/stops", make_stop, methods=["POST"]),
        Route("/v1/stops/{stop_id}", get_stop, methods=["GET"]),
    ]


def _target(gateway: Gateway, body: dict[str, Any], principal: Principal) -> Target:
    given = [name for name in _TARGETS if body.get(name) is not None]
    if len(given) != 1:
        raise ApiError(
            400, f"Exactly one of {', '.join(_TARGETS)} is needed.", code="invalid_target"
        )
    name, value = given[0], body[given[0]]
    if name == "request_ids":
        most = gateway.settings.stop_request_ids_max
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise _invalid(name, f"a list of 1 to {most} ids")
        if not all(isinstance(uid, str) and names.valid_id(uid) for uid in value):
            raise _invalid(name, "each is an id as the gateway gave it")
        return Target(uids=tuple(dict.fromkeys(value)))
    if name == "all":
        if value is not True:
            raise _invalid(name, "true, or absent")
        return Target(everything=True)
    if not isinstance(value, str) or not 0 < len(value) <= names.ID_MAX:
        raise _invalid(name, f"1 to {names.ID_MAX} characters")
    if name == "conversation":
        return Target(conversation=value)
    if not principal.reaches(value):
        raise ApiError(404, f"There is no tenant {value!r}.", code="tenant_not_found", param=name)
    if not names.valid_id(value):
        raise _invalid(name, "letters, digits and . _ -")
    return Target(tenant=value)


def _reason(value: Any, target: Target, principal: Principal) -> Reason:
    broad = bool(target.tenant) or target.everything
    if value is None:
        return Reason.ADMIN if principal.admin and broad else Reason.CLIENT_CANCEL
    if not principal.admin:
        raise ApiError(403, "Only an admin gives a reason.", code="forbidden", param="reason")
    if value not in [str(reason) for reason in _ADMIN_REASONS]:
        raise _invalid("reason", f"one of {', '.join(_ADMIN_REASONS)}")
    return Reason(value)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", code="invalid_value", param=param)
