"""``stopway cancel``: one stop, of a request or of many, and its receipt."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from stopway_cli import render
from stopway_cli.client import Api, Server
from stopway_cli.errors import CliError, Exit

_REACHED = {
    "accepted": {"accepted", "noticed", "stopped", "reclaimed", "already_finished"},
    "stopped": {"stopped", "reclaimed", "already_finished"},
    "reclaimed": {"reclaimed", "already_finished"},
}


def reached(status: str, wait: str) -> bool:
    """Whether a stop with ``status`` has come as far as ``wait`` asks."""
    return status in _REACHED[wait]


def target(
    request_ids: Sequence[str], conversation: str, tenant: str, everything: bool
) -> dict[str, Any]:
    """What to stop, as ``POST /v1/stops`` takes it. Raises ``CliError`` unless it is one thing."""
    named = {
        "request_ids": list(request_ids),
        "conversation": conversation,
        "tenant": tenant,
        "all": everything,
    }
    given = {name: value for name, value in named.items() if value}
    if len(given) != 1:
        raise CliError(
            "say what to stop by one of: ids of requests, --conversation, --tenant, --all",
            Exit.USAGE,
        )
    return given


async def run(
    target: dict[str, Any], server: Server, wait: str, timeout_s: float, as_json: bool
) -> Exit:
    """Stop ``target``, print the receipt; ``FAILED`` when the wait ran out."""
    sent = time.time()
    async with Api(server, timeout_s=timeout_s + 10.0) as api:
        ids = target.get("request_ids", ())
        if len(ids) == 1:
            stop = await api.cancel(ids[0], wait, timeout_s)
        else:
            stop = await api.post("/v1/stops", {**target, "wait": wait, "timeout": timeout_s})
    if as_json:
        print(json.dumps(stop, indent=2))
    else:
        render.console().print(render.receipt(stop, render.accepted_at(stop, sent)))
    return Exit.OK if reached(str(stop.get("status")), wait) else Exit.FAILED
