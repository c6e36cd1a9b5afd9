"""How ranks meet: both sides prove that they know the service's secret before they say anything.

The leader sends CHALLENGE with a nonce; the follower answers HELLO with its own nonce and an HMAC
over both and its fields; WELCOME carries the leader's HMAC over the follower's nonce. A frame that
fails the check closes the connection, before anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

from stopway_core.wire import Frame, FrameKind, encode


class HandshakeError(Exception):
    """The other side is not of this group; the message says in what it differs."""


def _mac(secret: str, role: str, nonce: str, fields: dict[str, Any]) -> str:
    text = json.dumps([role, nonce, fields], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def new_nonce() -> str:
    return secrets.token_hex(16)


def challenge(nonce: str) -> bytes:
    return encode(FrameKind.CHALLENGE, {"nonce": nonce})


def sealed(kind: FrameKind, secret: str, nonce: str, fields: dict[str, Any]) -> bytes:
    """HELLO or WELCOME: ``fields`` under the peer's ``nonce``."""
    return encode(kind, {"fields": fields, "mac": _mac(secret, kind.name, nonce, fields)})


def unsealed(frame: Frame, kind: FrameKind, secret: str, nonce: str) -> dict[str, Any]:
    """The fields of HELLO or WELCOME. Raises ``HandshakeError`` when they are not authentic."""
    body = frame.body
    if frame.kind is not kind or not isinstance(body, dict):
        raise HandshakeError(f"{kind.name} expected, {frame.kind.name} came")
    fields = body.get("fields")
    if not isinstance(fields, dict) or not hmac.compare_digest(
        _mac(secret, kind.name, nonce, fields), str(body.get("mac", ""))
    ):
        raise HandshakeError(f"{kind.name} is not signed with this service's secret")
    return fields


def check_hello(fields: dict[str, Any], expected: dict[str, Any], world: int) -> int:
    """The rank that HELLO is from. Raises ``HandshakeError`` saying what differs."""
    for key, want in expected.items():
        if fields.get(key) != want:
            raise HandshakeError(f"its {key} is {fields.get(key)!r}, this group's is {want!r}")
    rank = fields.get("rank")
    if not isinstance(rank, int) or not 0 < rank < world:
        raise HandshakeError(f"rank {rank!r} is not a follower of a group of {world}")
    return rank
