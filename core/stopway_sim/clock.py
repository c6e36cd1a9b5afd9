"""Simulated time: a heap of events, and first-in-first-out links."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from stopway_sim.choices import Chooser
from stopway_sim.failure import require

Callback = Callable[[], None]
EVENTS_MAX = 400_000


class Clock:
    """An event heap; equal times run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_us = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callback]] = []
        self._order = 0

    def at(self, time_us: int, call: Callback) -> None:
        """Run ``call`` at a time (now, when that is past)."""
        self._order += 1
        heapq.heappush(self._heap, (max(time_us, self.now_us), self._order, call))

    def after(self, delay_us: int, call: Callback) -> None:
        self.at(self.now_us + delay_us, call)

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._heap:
            self.now_us, _, call = heapq.heappop(self._heap)
            self.events += 1
            require(self.events < EVENTS_MAX, "this world never comes to rest")
            call()


class Link:
    """A connection: what is sent arrives in order, each after a delay of its own or later."""

    def __init__(self, clock: Clock, chooser: Chooser, delay_us_max: int) -> None:
        self._clock = clock
        self._chooser = chooser
        self._delay_us_max = delay_us_max
        self._last_us = 0

    def send(self, call: Callback) -> None:
        arrival = self._clock.now_us + self._chooser.between(0, self._delay_us_max)
        self._last_us = max(self._last_us, arrival)
        self._clock.at(self._last_us, call)
