"""The stop bus: a notice to every rank that may be late, lost, doubled or out of order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopway_core.events import StopSignal
from stopway_core.types import Stop
from stopway_sim.scenario import MS

if TYPE_CHECKING:
    from stopway_sim.world import Process, World

REPORT_US = 50 * MS


class Bus:
    """Redis as the ranks see it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def publish(self, stop: Stop) -> None:
        """Send one notice to each rank, or none, or two."""
        world = self._world
        scenario, chooser = world.scenario, world.chooser
        for rank in range(scenario.shape.ranks):
            if world.faulty(scenario.bus_drop):
                world.coverage["notices lost"] += 1
                continue
            copies = 2 if world.faulty(scenario.bus_duplicate) else 1
            for _ in range(copies):
                delay = chooser.between(0, scenario.bus_us_max)
                world.clock.after(delay, lambda rank=rank: self._notice(rank, stop))  # type: ignore[misc]

    def _notice(self, rank: int, stop: Stop) -> None:
        world = self._world
        if world.group is None:
            return
        process = world.processes[rank]
        if process.dead:
            return
        if stop.stop_id in process.noticed:
            world.coverage["notices doubled"] += 1
            return
        replica = process.rank.replica
        process.noticed[stop.stop_id] = (replica.turn, process.now)
        if rank == 0:
            world.group.receipts.noticed(0, stop.stop_id, replica.turn, process.now)
            world.post(StopSignal(stop))
            return
        process.changed = True
        world.progress(process)
        world.clock.after(REPORT_US, lambda: self._report(process, stop))

    def _report(self, process: Process, stop: Stop) -> None:
        """A stop that this rank heard of and that came in no turn: tell the leader."""
        if process.dead or stop.stop_id in process.rank.stops:
            return
        world = self._world
        world.coverage["stops reported by a follower"] += 1
        world.to_leader(process, lambda: world.post(StopSignal(stop)))
