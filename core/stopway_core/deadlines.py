"""Deadlines by time: a heap whose dead entries are dropped when they come up."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from stopway_core.types import DEADLINE_REASONS, Deadlines, Reason


class DeadlineHeap:
    """(when, key, which) for every deadline that is not met yet; O(log n) each."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Reason]] = []
        self._alive: dict[int, set[Reason]] = {}  # only ever looked up, never iterated

    def add(self, key: int, now: float, deadlines: Deadlines) -> None:
        """Start the clocks of one choice, which arrived ``now``."""
        for name, reason in DEADLINE_REASONS.items():
            seconds = getattr(deadlines, name)
            if seconds is not None:
                heapq.heappush(self._heap, (now + seconds, key, reason))
                self._alive.setdefault(key, set()).add(reason)

    def met_queue(self, key: int) -> None:
        """It left the queue."""
        self._discard(key, Reason.DEADLINE_QUEUE)

    def met_first_token(self, key: int) -> None:
        """It has its first token."""
        self._discard(key, Reason.DEADLINE_TTFT)

    def forget(self, key: int) -> None:
        """It has ended."""
        self._alive.pop(key, None)

    def next(self) -> float | None:
        """When the next deadline is, or ``None``."""
        self._prune()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[tuple[int, Reason]]:
        """Take every deadline that has passed, earliest first."""
        while True:
            self._prune()
            if not self._heap or self._heap[0][0] > now:
                return
            _, key, reason = heapq.heappop(self._heap)
            self._discard(key, reason)
            yield key, reason

    def _discard(self, key: int, reason: Reason) -> None:
        alive = self._alive.get(key)
        if alive is not None:
            alive.discard(reason)

    def _prune(self) -> None:
        heap, alive = self._heap, self._alive
        while heap and heap[0][2] not in alive.get(heap[0][1], ()):
            heapq.heappop(heap)
