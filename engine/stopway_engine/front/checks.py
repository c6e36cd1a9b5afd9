"""The line of grammars to be checked: tenants take turns, and nobody who has left stands in it.

A check may take seconds of a core. One tenant's bad grammars must not make another's wait, and a
client that leaves must not leave its work behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from stopway_core.types import Reason, Stop, covers
from stopway_engine.front.requests import Rejected

CHECKERS = 2  # threads; each waits for a process that compiles
WAITING_MAX = 64  # of one tenant


@dataclass(slots=True, eq=False)
class _Check:
    uid: str
    lease: str
    tenant: str
    conversation: str
    minted_at: float
    grammar: str
    verdict: asyncio.Future[None]

    def is_meant_by(self, stop: Stop) -> bool:
        """Whether ``stop`` is aimed at its request, by somebody who may."""
        if not stop.reaches(self.tenant) or not covers(stop, self.uid, self.minted_at):
            return False
        target = stop.target
        return self.uid in target.uids or target.selects(self.tenant, self.conversation)


class GrammarChecks:
    """Checks at most ``CHECKERS`` grammars at once; everything but the check is on the loop."""

    def __init__(self, check: Callable[[str], None]) -> None:
        """``check`` runs in a thread and raises ``Rejected`` for what cannot be used."""
        self._check = check
        self._threads = ThreadPoolExecutor(CHECKERS, "check-grammar")
        self._busy = 0
        self._lines: dict[str, deque[_Check]] = {}  # by tenant; the first is next
        self._open: dict[str, _Check] = {}  # by uid, waiting or being checked

    async def check(self, message: Mapping[str, Any], lease: str) -> None:
        """Wait for the verdict on the grammar of a submitted request. Raises ``Rejected``."""
        uid, tenant = message["uid"], message["tenant"]
        waiting = len(self._lines.get(tenant, ()))
        if waiting >= WAITING_MAX:
            full = f"{waiting} grammars wait to be checked; try later"
            raise Rejected(full, status=429, code="queue_full", param=None)
        verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        check = _Check(
            uid,
            lease,
            tenant,
            message.get("conversation") or "",
            message["minted_at"],
            message["grammar"],
            verdict,
        )
        self._open[uid] = check
        self._lines.setdefault(tenant, deque()).append(check)
        self._start()
        try:
            await verdict
        finally:
            if self._open.get(uid) is check:
                del self._open[uid]
            self._leave(check)

    def stop(self, stop: Stop) -> None:
        """Reject those that a stop is aimed at: nobody waits for them now."""
        for check in self._open.values():
            if check.is_meant_by(stop):
                _reject(check, _stopped(stop.reason))

    def lose(self, lease: str) -> None:
        """Reject all that came on one session."""
        for check in self._open.values():
            if check.lease == lease:
                _reject(check, _stopped(Reason.CLIENT_DISCONNECT))

    def refuse_all(self, message: str, code: Reason) -> None:
        """Reject all: the group cannot take them, and another may check and take them."""
        for check in self._open.values():
            _reject(check, Rejected(message, status=503, code=code, param=None))

    def _leave(self, check: _Check) -> None:
        line = self._lines.get(check.tenant)
        if line is not None and check in line:
            line.remove(check)
            if not line:
                del self._lines[check.tenant]

    def _start(self) -> None:
        while self._busy < CHECKERS and self._lines:
            tenant, line = next(iter(self._lines.items()))
            check = line.popleft()
            del self._lines[tenant]
            if line:
                self._lines[tenant] = line  # behind all other tenants
            if check.verdict.done():
                continue
            self._busy += 1
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._threads, self._check, check.grammar)
            done.add_done_callback(partial(self._checked, check))

    def _checked(self, check: _Check, done: asyncio.Future[None]) -> None:
        self._busy -= 1
        problem = done.exception()
        if not check.verdict.done():
            if problem is None:
                check.verdict.set_result(None)
            else:
                check.verdict.set_exception(problem)
        self._start()


def _reject(check: _Check, why: Rejected) -> None:
    if not check.verdict.done():
        check.verdict.set_exception(why)


def _stopped(reason: Reason) -> Rejected:
    message = "the request was stopped before its grammar was checked"
    return Rejected(message, status=409, code=reason, param=None)
