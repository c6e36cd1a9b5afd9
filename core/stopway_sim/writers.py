"""Writers that are in no order with the exec queues: KV that arrives from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopway_sim.group import Group, Load

if TYPE_CHECKING:
    from stopway_sim.world import Process, World

TRIES = 20


class Writers:
    """One load at a time, of a prefix that some request may have."""

    def __init__(self, world: World, *, fenced: bool) -> None:
        self._world = world
        self._fenced = fenced
        self._pending: set[int] = set()  # ranks that a load has yet to reach

    def begin(self, tries: int = TRIES) -> None:
        """The KV of a prefix that some request may have arrives from elsewhere."""
        group = self._world.group
        if group is None or self._world.processes[0].dead or group.ranks[0].loads:
            return
        shape = self._world.scenario.shape
        family = self._world.chooser.below(3)
        count = shape.block_size * self._world.scenario.load_blocks
        tokens = [(family * 5 + 3 * i) % shape.vocab for i in range(count)]
        got = group.begin_load(tokens, fenced=self._fenced)
        if got is None:
            self._world.coverage["loads that found no block past its fence"] += 1
            if tries:
                self._world.clock.after(300, lambda: self.begin(tries - 1))
            return
        load, frame = got
        self._world.coverage["loads"] += 1
        self._pending = set(range(shape.ranks))
        for process in self._world.processes[1:]:
            process.down.send(lambda p=process: self._world.arrive(group, p, frame))  # type: ignore[misc]
        self.write(group, self._world.processes[0], load)

    def write(self, group: Group, process: Process, load: Load) -> None:
        solo = self._world.solos.of(tuple(load.tokens))

        def write() -> None:
            if process.dead:
                return
            group.write_load(process.rank, load, solo)
            if process.rank.rank:
                self._world.to_leader(process, lambda: self._written(group, process, load))
            else:
                self._written(group, process, load)

        self._world.clock.after(
            self._world.chooser.between(0, self._world.scenario.step_us_max), write
        )

    def _written(self, group: Group, process: Process, load: Load) -> None:
        self._pending.discard(process.rank.rank)
        if self._pending or self._world.group is not group:
            return
        frame = group.end_load(load)
        for follower in self._world.processes[1:]:
            follower.down.send(lambda p=follower: self._world.arrive(group, p, frame))  # type: ignore[misc]
        self._world.wake(0)
