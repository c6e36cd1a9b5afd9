"""Host memory loads: off-queue writers that come at random and keep blocks for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopway_sim.fleet.events import START_S
from stopway_sim.fleet.group import SimGroup
from stopway_sim.fleet.workload import stream

if TYPE_CHECKING:
    from stopway_sim.fleet.cell import Cell

_LOADS = 7


class HostLoader:
    """A Poisson stream of loads for each group of a cell, while it has requests."""

    def __init__(self, cell: Cell, seed: int, index: int) -> None:
        self._cell = cell
        self._plan = cell.config.host_loads
        self._random = stream(seed, _LOADS, index)
        self._count = 0

    def begin(self) -> None:
        """Set the first load of each group."""
        if self._plan.per_s > 0:
            for group in self._cell.groups:
                self._next(START_S, group)

    def _next(self, now: float, group: SimGroup) -> None:
        self._cell.events.at(now + self._random.expovariate(self._plan.per_s), self._load, group)

    def _load(self, group: SimGroup) -> None:
        cell, now = self._cell, self._cell.events.now
        if not cell.busy:
            return
        self._next(now, group)
        if group.down_until > now:
            return
        self._count += 1
        holder = ("host", self._count)
        if group.off_queue.take(holder, self._plan.blocks):
            cell.tally.counts["host_loads"] += 1
            cell.events.at(now + self._plan.seconds, self._done, group, group.epoch, holder)
        else:
            cell.tally.counts["host_loads_given_up"] += 1

    def _done(self, group: SimGroup, epoch: int, holder: tuple[str, int]) -> None:
        if epoch == group.epoch:
            group.off_queue.drop(holder)
            group.freed()
