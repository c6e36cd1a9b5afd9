"""Simulated time of one cell: a heap of calls."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

START_S = 1000.0
"""The simulated clock's first moment: the planner takes 0 for "not yet"."""


class Events:
    """Calls by time; equal times run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = START_S
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Run ``call(*args)`` at ``when``, or now when that is past."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, call, args))

    def quiet(self) -> bool:
        """Whether nothing else happens at this moment."""
        return not self._heap or self._heap[0][0] > self.now

    def run(self) -> None:
        """Run until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
