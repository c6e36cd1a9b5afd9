"""``stopway cancel``: one stop and its receipt."""

from __future__ import annotations

import json
import time

from stopway_cli import render
from stopway_cli.client import Api, Server
from stopway_cli.errors import Exit

_REACHED = {
    "accepted": {"accepted", "noticed", "stopped", "reclaimed", "already_finished"},
    "stopped": {"stopped", "reclaimed", "already_finished"},
    "reclaimed": {"reclaimed", "already_finished"},
}


def reached(status: str, wait: str) -> bool:
    """Whether a stop with ``status`` has come as far as ``wait`` asks."""
    return status in _REACHED[wait]


async def run(ident: str, server: Server, wait: str, timeout_s: float, as_json: bool) -> Exit:
    """Cancel ``ident``, print the receipt; ``FAILED`` when the wait ran out."""
    sent = time.time()
    async with Api(server, timeout_s=timeout_s + 10.0) as api:
        stop = await api.cancel(ident, wait, timeout_s)
    if as_json:
        print(json.dumps(stop, indent=2))
    else:
        render.console().print(render.receipt(stop, render.accepted_at(stop, sent)))
    return Exit.OK if reached(str(stop.get("status")), wait) else Exit.FAILED
