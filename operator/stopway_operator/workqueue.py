"""Keys that are due: coalesced, delayed, and never worked on twice at the same time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable


class WorkQueue:
    """``clock`` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}
        self._busy: set[str] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: str, delay_s: float = 0.0) -> None:
        """Have ``key`` worked on in ``delay_s`` at the latest."""
        at = self._clock() + delay_s
        if self._due.get(key, at + 1.0) <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, key))
        self._changed.set()

    async def take(self) -> str:
        """The next key that is due; it is not given out again before ``done``."""
        while True:
            self._changed.clear()
            wait = self._next()
            if isinstance(wait, str):
                return wait
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: str) -> None:
        """``key`` may be given out again."""
        self._busy.discard(key)
        if key in self._due:
            heapq.heappush(self._heap, (self._due[key], key))
            self._changed.set()

    def _next(self) -> str | float | None:
        """A key that is due now, or how long to wait for one."""
        now = self._clock()
        while self._heap:
            at, key = self._heap[0]
            if self._due.get(key) != at or key in self._busy:
                heapq.heappop(self._heap)  # an older entry; ``done`` brings a busy one back
                continue
            if at > now:
                return at - now
            heapq.heappop(self._heap)
            del self._due[key]
            self._busy.add(key)
            return key
        return None
