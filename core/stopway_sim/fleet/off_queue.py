"""Off-queue use of a group's blocks: host loads and transfers, which no step is in order with."""

from __future__ import annotations

from collections.abc import Sequence

from stopway_core.ledger import Holder, OutOfResources
from stopway_core.replica import Replica


class OffQueue:
    """Takes blocks on every given replica alike, the leader's first.

    A *hazard* is a block taken over which the last launched step has not completed: that step may
    still write what the new owner writes. With ``fenced`` there is none by construction.

    Off-queue use never takes so much that the longest request (``longest`` tokens) would not fit.
    """

    def __init__(self, replicas: Sequence[Replica], *, fenced: bool, longest: int) -> None:
        self._replicas = replicas
        self._fenced = fenced
        leader = replicas[0]
        self._room = leader.ledger.blocks.total - leader.blocks_of(longest)
        self._taken: dict[Holder, list[list[int]]] = {}
        self.hazards = 0

    def take(self, holder: Holder, count: int, *, spare: int = 0) -> bool:
        """Take ``count`` blocks, evicting cache for them; False when too few may be taken.

        ``spare`` blocks stay for others.
        """
        leader = self._replicas[0]
        pool, done = leader.ledger.blocks, leader.processed
        if count > self._room or count + spare > pool.free + pool.idle:
            return False
        for replica in self._replicas:
            free = replica.ledger.blocks.free
            if count > free:
                replica.cache.evict(count - free)
        taken: list[list[int]] = []
        for replica in self._replicas:
            own = replica.ledger.blocks
            try:
                if self._fenced:
                    taken.append(own.acquire_unordered(holder, count, done))
                else:
                    taken.append(own.acquire(holder, count))
            except OutOfResources:
                return False  # at the leader and so everywhere, before any has taken
        self._room -= count
        if not self._fenced:
            self.hazards += sum(1 for block in taken[0] if pool.last_step[block] > done)
        self._taken[holder] = taken
        return True

    def fill(self, holder: Holder, tokens: Sequence[int]) -> None:
        """What was taken holds the KV of ``tokens`` (whole blocks): cache it, and let go."""
        for replica, blocks in zip(self._replicas, self._taken.pop(holder), strict=True):
            entry, size = replica.cache.root(""), replica.block_size
            for index, block in enumerate(blocks):
                replica.ledger.blocks.seal(block)
                run = tuple(tokens[index * size : (index + 1) * size])
                entry = replica.cache.insert(entry, run, block)
            replica.ledger.drop(holder)
        self._room += len(blocks)

    def lend(self, holder: Holder, tokens: Sequence[int]) -> None:
        """Keep the cached KV of ``tokens`` for a reader, until ``drop``."""
        for replica in self._replicas:
            blocks, _ = replica.cache.match("", list(tokens), len(tokens))
            replica.ledger.blocks.share(holder, blocks)

    def drop(self, holder: Holder) -> None:
        """Let go of what was taken or lent."""
        taken = self._taken.pop(holder, None)
        self._room += len(taken[0]) if taken else 0
        for replica in self._replicas:
            replica.ledger.drop(holder)
