"""All requests of this gateway: the live ones, and the finished ones for a while. Bounded."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator

from stopway_core import names
from stopway_core.types import Target
from stopway_gateway.auth import Principal
from stopway_gateway.request import Request


class RequestsTable:
    """By uid. A finished request stays readable for ``keep_s``, of ``keep_max`` at most."""

    def __init__(self, gateway_id: str, keep_s: float, keep_max: int) -> None:
        self._gateway_id = gateway_id
        self._keep_s = keep_s
        self._keep_max = keep_max
        self._live: dict[str, Request] = {}
        self._ended: OrderedDict[str, Request] = OrderedDict()

    def new_uid(self) -> str:
        """A uid that no other request has or will have."""
        return names.request_uid(int(time.time() * 1000), self._gateway_id, secrets.token_hex(8))

    def mine(self, uid: str) -> bool:
        """Whether this gateway minted ``uid``: then what is not here is unknown to all."""
        return names.uid_gateway(uid) == self._gateway_id

    def add(self, request: Request) -> None:
        """A request that begins."""
        self._live[request.uid] = request

    def finish(self, request: Request) -> None:
        """Its outcome is settled: from now on it is only remembered."""
        if self._live.pop(request.uid, None) is not None:
            self._ended[request.uid] = request
            self.trim()

    def trim(self) -> None:
        """Forget what is too old, or too much."""
        horizon = time.time() - self._keep_s
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= self._keep_max and oldest.ended_at > horizon:
                return
            self._ended.popitem(last=False)

    def get(self, uid: str, principal: Principal) -> Request | None:
        """The request, unless there is none or it is another tenant's."""
        request = self._live.get(uid) or self._ended.get(uid)
        return request if request is not None and principal.reaches(request.tenant) else None

    def visible(self, principal: Principal) -> Iterator[Request]:
        """All that this principal may see, newest first."""
        for part in (self._live, self._ended):
            for request in reversed(part.values()):
                if principal.reaches(request.tenant):
                    yield request

    def live(self) -> list[Request]:
        """Those without an outcome."""
        return list(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def matching(self, target: Target, principal: Principal) -> list[Request]:
        """The live requests that a stop is aimed at."""
        if target.uids:
            found = (self._live.get(uid) for uid in target.uids)
            chosen = [request for request in found if request is not None]
        else:
            chosen = [
                request
                for request in self._live.values()
                if target.selects(request.tenant, request.generation.conversation)
            ]
        return [request for request in chosen if principal.reaches(request.tenant)]
