"""Stops as they travel: JSON, signed, checked before anything acts on them.

HMAC-SHA256 over the canonical JSON (sorted keys, no spaces) of every field but the signature.
A key is named by ``kid``, so that keys can be rotated.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from stopway_core import names
from stopway_core.types import Reason, Stop, Target

UIDS_MAX = 10_000
_STOP_REASONS = frozenset(
    {
        Reason.CLIENT_CANCEL,
        Reason.CLIENT_DISCONNECT,
        Reason.ADMIN,
        Reason.DRAIN,
        Reason.DEADLINE_QUEUE,
        Reason.DEADLINE_TTFT,
        Reason.DEADLINE_TOTAL,
    }
)


class StopError(ValueError):
    """A stop entry that is malformed, unsigned, or signed by somebody else."""


def _canonical(entry: Mapping[str, Any]) -> bytes:
    unsigned = {key: value for key, value in entry.items() if key != "sig"}
    return json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()


def _digest(entry: Mapping[str, Any], secret: str) -> str:
    return hmac.new(secret.encode(), _canonical(entry), hashlib.sha256).hexdigest()


def _bytes(value: Any) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else b""


def target_to_json(target: Target) -> dict[str, Any]:
    """The wire form of a target: exactly one key."""
    if target.everything:
        return {"all": True}
    if target.tenant:
        return {"tenant": target.tenant}
    if target.conversation:
        return {"conversation": target.conversation}
    return {"uids": list(target.uids)}


def target_from_json(value: Any) -> Target:
    """A target from its wire form. Raises ``StopError`` unless exactly one key is set."""
    if not isinstance(value, dict) or len(value) != 1:
        raise StopError("a stop has exactly one target")
    (key, what), *_ = value.items()
    if key == "all" and what is True:
        return Target(everything=True)
    if key == "tenant" and isinstance(what, str) and names.valid_id(what):
        return Target(tenant=what)
    if key == "conversation" and isinstance(what, str) and 0 < len(what) <= names.ID_MAX:
        return Target(conversation=what)
    if key == "uids" and isinstance(what, list) and 0 < len(what) <= UIDS_MAX:
        if not all(isinstance(uid, str) and names.valid_id(uid) for uid in what):
            raise StopError("a stop names a request id that cannot be one")
        return Target(uids=tuple(dict.fromkeys(what)))
    raise StopError(f"not a stop target: {key!r}")


def sign(stop: Stop, secret: str, kid: str = "1") -> dict[str, Any]:
    """The signed wire form of ``stop``."""
    entry: dict[str, Any] = {
        "stop_id": stop.stop_id,
        "target": target_to_json(stop.target),
        "reason": stop.reason.value,
        "tenant": stop.tenant,
        "admin": stop.admin,
        "issued_at": stop.issued_at,
        "traceparent": stop.traceparent,
        "publisher": stop.publisher,
        "sequence": stop.sequence,
        "kid": kid,
    }
    entry["sig"] = _digest(entry, secret)
    return entry


def verify(
    entry: Any, keys: Mapping[str, str], *, now: float | None = None, age_max_s: float = 3600.0
) -> Stop:
    """The stop that ``entry`` carries. Raises ``StopError`` saying what is wrong with it.

    With ``now``, an entry issued more than ``age_max_s`` before or 60 s after it is refused.
    """
    if not isinstance(entry, dict):
        raise StopError("a stop entry is a JSON object")
    secret = keys.get(str(entry.get("kid", "")))
    if secret is None:
        raise StopError("signed with a key that is not known here")
    try:
        expected = _digest(entry, secret)
    except (TypeError, ValueError, RecursionError):
        raise StopError("a stop entry that cannot be read") from None
    if not hmac.compare_digest(expected.encode(), _bytes(entry.get("sig"))):
        raise StopError("the signature does not match")
    try:
        stop = Stop(
            stop_id=_text(entry, "stop_id", must_be_id=True),
            target=target_from_json(entry["target"]),
            reason=Reason(entry["reason"]),
            tenant=_text(entry, "tenant", must_be_id=True),
            admin=entry["admin"] is True,
            issued_at=float(entry["issued_at"]),
            traceparent=_text(entry, "traceparent"),
            publisher=_text(entry, "publisher"),
            sequence=int(entry["sequence"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StopError(f"a stop entry with a bad field: {error}") from None
    if stop.reason not in _STOP_REASONS:
        raise StopError(f"{stop.reason} is not a reason that a stop can have")
    if now is not None and not (now - age_max_s <= stop.issued_at <= now + 60.0):
        raise StopError("issued too long ago, or in the future: check the clocks")
    return stop


def _text(entry: Mapping[str, Any], key: str, *, must_be_id: bool = False) -> str:
    value = entry[key]
    if not isinstance(value, str) or len(value) > 256 or (must_be_id and not names.valid_id(value)):
        raise ValueError(f"{key} is not valid")
    return value
