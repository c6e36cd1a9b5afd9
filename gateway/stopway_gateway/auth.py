"""API keys. Deny by default: each key has a tenant and a role, and all else is 401."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

from stopway_gateway.errors import ApiError

DEFAULT_TENANT = "default"
_OWNER = re.compile(r"([A-Za-z0-9._-]{1,64})(:admin)?")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    tenant: str
    admin: bool

    def reaches(self, tenant: str) -> bool:
        """Whether what belongs to ``tenant`` exists for this principal."""
        return self.admin or self.tenant == tenant


class KeyRing:
    """The keys, as digests, so that a comparison takes the same time whatever is presented."""

    def __init__(self, text: str) -> None:
        self._keys: list[tuple[bytes, Principal]] = []
        for entry in re.split(r"[;,\n]", text):
            if entry.strip():
                key, principal = _parse(entry.strip())
                self._keys.append((_digest(key), principal))

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, headers: list[tuple[bytes, bytes]]) -> Principal:
        """Who presents ``Authorization: Bearer KEY``. Raises a 401."""
        presented = b""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                presented = value[7:].strip()
        digest = hashlib.sha256(presented).digest()
        found: Principal | None = None
        for known, principal in self._keys:  # all of them: no early exit to time
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None or not presented:
            raise ApiError(
                401,
                "A valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _parse(entry: str) -> tuple[str, Principal]:
    owner, equals, key = entry.partition("=")
    # A bare key may end with the padding of base64; only text after "=" makes a tenant of it.
    if not equals or not key.strip("="):
        return entry, Principal(DEFAULT_TENANT, admin=True)
    match = _OWNER.fullmatch(owner.strip())
    if match is None:
        raise ValueError("an API key is [TENANT[:admin]=]KEY, TENANT of letters, digits and . _ -")
    return key.strip(), Principal(match[1], admin=match[2] is not None)
