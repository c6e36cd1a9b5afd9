"""Secrets, read by name and only when needed: never listed, never watched, values never kept."""

from __future__ import annotations

from collections.abc import Iterable

from stopway_operator import kinds, objects
from stopway_operator.api import Api
from stopway_operator.objects import Obj


class SecretCache:
    """Remembers for ``age_s`` that a Secret exists, who owns it, and which keys it has."""

    def __init__(self, api: Api, age_s: float) -> None:
        self._api = api
        self._age_s = age_s
        self._known: dict[tuple[str, str], tuple[float, Obj]] = {}

    def put(self, secret: Obj) -> Obj:
        """Remember a Secret without its values."""
        known = {
            "metadata": {k: v for k, v in objects.meta(secret).items() if k != "managedFields"},
            "keys": sorted(secret.get("data") or {}),
        }
        key = (objects.namespace_of(secret), objects.name_of(secret))
        self._known[key] = (0.0, known)  # its age counts from when it is asked for next
        return known

    def forget(self, namespace: str, name: str) -> None:
        self._known.pop((namespace, name), None)

    async def read(self, namespace: str, names: Iterable[str], now: float) -> dict[str, Obj]:
        """Those of ``names`` that exist. Raises ``ApiError``."""
        found = {}
        for name in names:
            at, known = self._known.get((namespace, name), (0.0, {}))
            if known and not at:
                self._known[namespace, name] = (now, known)
            elif not known or now - at > self._age_s:
                secret = await self._api.get(kinds.SECRET, namespace, name)
                if secret is None:
                    self.forget(namespace, name)
                    continue
                known = self.put(secret)
                self._known[namespace, name] = (now, known)
            found[name] = known
        if len(self._known) > 10_000:
            self._known.clear()
        return found
