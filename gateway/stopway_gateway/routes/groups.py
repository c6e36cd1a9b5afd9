"""``/v1/groups``, for admins: what the groups do, and pause, resume, drain."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from stopway_core import names
from stopway_core.events import Mode
from stopway_gateway.answers import GroupList, ModeAnswer
from stopway_gateway.errors import ApiError
from stopway_gateway.gateway import Gateway
from stopway_gateway.routes.common import (
    DocumentedRoute,
    answer,
    body_docs,
    json_of,
    need_admin,
    principal_of,
    refusals,
)
from stopway_gateway.schemas import GroupsBody, PauseBody, validate

_AUDIT = logging.getLogger("stopway_gateway.audit")
_LATER: dict[int | str, dict[str, Any]] = {
    202: {"model": ModeAnswer, "description": "The time ran out; `pending_on` says for whom."}
}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Listing them, and telling them what to do."""

    async def list_groups(request: HttpRequest) -> Response:
        """The groups that this gateway knows, as their leaders last told of them (admins)."""
        need_admin(request)
        return answer({"groups": gateway.modes.shown(gateway.registry.groups())})

    async def pause_groups(request: HttpRequest) -> Response:
        """Have groups start nothing new, until they are resumed (admins).

        New requests go to other groups while one serves; else they wait, and their deadlines run.
        """
        need_admin(request)
        body = validate(PauseBody, await json_of(request, gateway.settings))
        return await _change(gateway, request, Mode(body.mode), body)

    async def resume_groups(request: HttpRequest) -> Response:
        """Have groups that were paused or drained go on (admins)."""
        return await _change(gateway, request, Mode.RUNNING, await _optional(gateway, request))

    async def drain_groups(request: HttpRequest) -> Response:
        """Have groups finish all that they have and refuse new requests, until resumed (admins)."""
        return await _change(gateway, request, Mode.DRAINING, await _optional(gateway, request))

    return [
        DocumentedRoute(
            "GET",
            "/v1/groups",
            list_groups,
            tag="groups",
            shape=GroupList,
            success="The groups.",
            responses=refusals(401, 403),
        ),
        _mode_route("pause", pause_groups, body_docs(PauseBody)),
        _mode_route("resume", resume_groups, body_docs(GroupsBody, required=False)),
        _mode_route("drain", drain_groups, body_docs(GroupsBody, required=False)),
    ]


def _mode_route(name: str, endpoint: Any, body: dict[str, Any]) -> DocumentedRoute:
    return DocumentedRoute(
        "POST",
        f"/v1/groups/{name}",
        endpoint,
        tag="groups",
        shape=ModeAnswer,
        success="Every group says that it is so.",
        responses={**_LATER, **refusals(400, 401, 403, 404, 408, 413, 503)},
        extra=body,
    )


async def _optional(gateway: Gateway, request: HttpRequest) -> GroupsBody:
    need_admin(request)
    return validate(GroupsBody, await json_of(request, gateway.settings, required=False))


async def _change(gateway: Gateway, request: HttpRequest, mode: Mode, body: GroupsBody) -> Response:
    gateway.check_wait(body.timeout)
    groups = _groups(gateway, body)
    _AUDIT.info(
        "an admin of tenant %s at %s sets mode %s of groups %s",
        principal_of(request).tenant,
        request.client.host if request.client else "an unknown address",
        mode,
        ", ".join(groups),
    )
    pending = await gateway.modes.change(mode, groups, body.timeout)
    shown = gateway.modes.shown(groups)
    return answer({"mode": mode, "pending_on": pending, "groups": shown}, 202 if pending else 200)


def _groups(gateway: Gateway, body: GroupsBody) -> list[str]:
    known = gateway.registry.groups()
    for group in body.groups or ():
        if group not in known:
            message = f"There is no group {group[: names.ID_MAX]!r}."
            raise ApiError(404, message, code="group_not_found", param="groups")
    if not known:
        raise ApiError(
            503, "No group is known yet.", code="not_ready", headers={"retry-after": "1"}
        )
    return known if body.groups is None else list(dict.fromkeys(body.groups))
