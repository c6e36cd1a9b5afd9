"""Every name that two parts must spell alike: streams, headers, environment, span attributes."""

from __future__ import annotations

import re

BLOCK_SIZE = 16  # tokens per KV block

# --- Redis ---------------------------------------------------------------------------------


def stops_stream(service_uid: str, group: str) -> str:
    """The stream that carries stops to every pod of one group."""
    return f"stopway:{service_uid}:{group}:stops"


def gateway_stops_stream(service_uid: str) -> str:
    """The stream that carries stops to every gateway, for what it has not dispatched."""
    return stops_stream(service_uid, "gateway")


def receipts_stream(service_uid: str) -> str:
    """The stream of receipts, for gateways that did not publish the stop."""
    return f"stopway:{service_uid}:receipts"


# --- public ids ----------------------------------------------------------------------------

ID_MAX = 128
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def valid_id(text: str) -> bool:
    """Whether ``text`` may be an id: 1 to 128 of letters, digits and ``. _ : -``."""
    return _ID.fullmatch(text) is not None


def request_uid(millis: int, gateway: str, entropy: str) -> str:
    """A uid as a gateway mints it: time, gateway, random; no part may contain ``-``."""
    return f"req-{millis:x}-{gateway}-{entropy}"


def uid_gateway(uid: str) -> str:
    """The gateway that minted ``uid``, or an empty string when it has another shape."""
    parts = uid.split(".", 1)[0].split("-")
    return parts[2] if len(parts) == 4 and parts[0] == "req" else ""


def publisher_id(gateway: str, entropy: str) -> str:
    """One life of a gateway, as its stops are numbered by; no part may contain ``-``."""
    return f"{gateway}-{entropy}"


def publisher_gateway(publisher: str) -> str:
    """The gateway of a publisher of stops, or an empty string when it has another shape."""
    parts = publisher.split("-")
    return parts[0] if len(parts) == 2 else ""


def child_uid(uid: str, index: int) -> str:
    """The uid of one choice of a request with ``n`` > 1."""
    return f"{uid}.{index}"


def parse_traceparent(text: str) -> tuple[str, str, bool] | None:
    """(trace id, span id, sampled) of a W3C ``traceparent``, or None when it is not one."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found[1] == "0" * 32 or found[2] == "0" * 16:
        return None
    return found[1], found[2], bool(int(found[3], 16) & 1)


def trace_id_of(traceparent: str) -> str:
    """The trace id in a ``traceparent``, or an empty string."""
    context = parse_traceparent(traceparent)
    return "" if context is None else context[0]


# --- load ----------------------------------------------------------------------------------

LOAD = ("running", "waiting", "free", "held", "cached", "drafted", "accepted")
"""A group's figures: sequences, KV blocks, and draft tokens of the epoch."""

# --- phases, spans -------------------------------------------------------------------------

PHASES = ("notify", "in_flight", "reclaim", "handoff")
SPAN_STOP = "stop"
SPAN_NOTIFY = "stop.notify"
SPAN_NOTICE = "stop.notice"
SPAN_IN_FLIGHT = "stop.in_flight"
SPAN_RECLAIM = "stop.reclaim"
SPAN_HANDOFF = "stop.handoff"
