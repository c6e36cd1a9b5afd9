"""The ledger: who holds what. A resource is free exactly when nothing holds it.

``hold`` adds an edge, ``drop`` ends every edge of a holder: the one exit by which anything that a
request owns comes back. Nothing outside this file frees.

A pool counts one kind of resource: device blocks today; host blocks, adapters, encoder outputs
and grammar slots are other pools of the same ledger. Each resource has a reference count (= its
edges); each holder has the list of what it holds; the reverse graph is computed only to be looked
at. ``hold`` is O(holds of that holder), one for an entry of the cache; ``drop`` is O(resources
of the holder).

**Fences.** Dropping frees at once, although a step in flight may still write the block: use that
is ordered behind it on the rank's exec queue may take any free block. Use that is not ordered
behind it (a transfer, a host load) must wait: ``acquire_unordered`` takes only blocks over which
the last launched step has completed.

**Sealed and mutable.** A mutable block has exactly one holder, which may write it. A sealed block
is full of confirmed tokens, is never written again, and may have any number of holders; only
sealed blocks are cached.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

Holder = tuple[str, int]
"""What owns an edge: (kind, id), with kind one of request, cache, transfer, host, fence."""

BLOCKS = "device_blocks"
GRAMMARS = "grammar_slots"
REQUEST = "request"
CACHE = "cache"


class LedgerError(AssertionError):
    """An invariant of the ledger does not hold: a bug, never a condition to handle."""


class OutOfResources(Exception):
    """More was asked for than is free. The planner must have made room before it asked."""


class Dropped(NamedTuple):
    """What became of the resources of a dropped holder.

    ``freed`` have no holder any more, ``cached`` are held by the cache alone, ``lent`` are still
    held by somebody else (a request that shares the prefix, a transfer).
    """

    freed: int = 0
    cached: int = 0
    lent: int = 0

    def plus(self, other: Dropped) -> Dropped:
        return Dropped(self.freed + other.freed, self.cached + other.cached, self.lent + other.lent)


class Pool:
    """The edges of one kind of resource, numbered ``0 .. total - 1``."""

    __slots__ = (
        "_free",
        "_holds",
        "_idle",
        "cached",
        "kind",
        "last_step",
        "refs",
        "sealed",
        "total",
    )

    def __init__(self, kind: str, total: int) -> None:
        self.kind = kind
        self.total = total
        self.refs = array("i", bytes(4 * total))
        self.cached = bytearray(total)  # 1: one of the edges is the cache's
        self.sealed = bytearray(total)
        self.last_step = array("q", bytes(8 * total))  # newest step launched over it
        self._free: deque[int] = deque(range(total))
        self._holds: dict[Holder, list[int]] = {}
        # Held by the cache alone, least recently released first: what may be evicted.
        self._idle: OrderedDict[int, None] = OrderedDict()

    # --- counts --------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many nothing holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """How many the cache alone holds: reusable after an eviction."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """How many somebody other than the cache holds."""
        return self.total - len(self._free) - len(self._idle)

    def holds(self, holder: Holder) -> list[int]:
        """What ``holder`` holds, oldest first (a copy)."""
        return list(self._holds.get(holder, ()))

    def holders(self) -> dict[Holder, int]:
        """How many resources each holder other than the cache holds; to be looked at."""
        return {holder: len(what) for holder, what in self._holds.items() if holder[0] != CACHE}

    def oldest_idle(self) -> int:
        """The cached resource that was released longest ago. Raises when there is none."""
        if not self._idle:
            raise OutOfResources(f"no idle cached resource among {self.total} {self.kind}")
        return next(iter(self._idle))

    def peek(self) -> int:
        """The resource that is taken next. Raises when none is free."""
        if not self._free:
            raise OutOfResources(f"no {self.kind} is free of {self.total}")
        return self._free[0]

    def next_free(self, count: int) -> list[int]:
        """The ``count`` free resources that are taken next, as far as there are so many."""
        return list(islice(self._free, count))

    def exclusive(self, holder: Holder) -> int:
        """How many of the holder's resources a drop would make free or idle."""
        refs, cached = self.refs, self.cached
        return sum(1 for b in self._holds.get(holder, ()) if refs[b] - cached[b] == 1)

    # --- edges ---------------------------------------------------------------------------

    def acquire(self, holder: Holder, count: int) -> list[int]:
        """Take ``count`` free resources for use that is ordered behind all launched steps."""
        if count > len(self._free):
            raise OutOfResources(f"{count} {self.kind} wanted, {len(self._free)} free")
        return self._take(holder, [self._free.popleft() for _ in range(count)])

    def acquire_unordered(self, holder: Holder, count: int, completed_step: int) -> list[int]:
        """Take ``count`` free resources whose last launched step is not after ``completed_step``.

        Raises ``OutOfResources`` when too few have passed their fence; none is taken then.
        """
        last = self.last_step
        ready = [b for b in self._free if last[b] <= completed_step][:count]
        if len(ready) < count:
            raise OutOfResources(f"{count} {self.kind} wanted, {len(ready)} past their fence")
        chosen = set(ready)
        self._free = deque(b for b in self._free if b not in chosen)
        return self._take(holder, ready)

    def _take(self, holder: Holder, chosen: list[int]) -> list[int]:
        refs, sealed = self.refs, self.sealed
        for b in chosen:
            refs[b] = 1
            sealed[b] = 0
        self._holds.setdefault(holder, []).extend(chosen)
        return chosen

    def hold(self, holder: Holder, resource: int) -> None:
        """Add an edge to a resource that somebody holds already, and that is sealed."""
        if not self.refs[resource] or not self.sealed[resource]:
            raise LedgerError(f"{self.kind} {resource} cannot be shared: it is not sealed and held")
        what = self._holds.setdefault(holder, [])
        if resource in what or (holder[0] == CACHE and self.cached[resource]):
            raise LedgerError(f"{holder} holds {self.kind} {resource} already")
        what.append(resource)
        self.refs[resource] += 1
        if holder[0] == CACHE:
            self.cached[resource] = 1
        else:
            self._idle.pop(resource, None)

    def share(self, holder: Holder, resources: Iterable[int]) -> None:
        """``hold`` for a new holder and many distinct sealed resources at once."""
        if holder in self._holds:
            raise LedgerError(f"{holder} holds {self.kind} already")
        what = self._holds[holder] = []
        refs, sealed, idle = self.refs, self.sealed, self._idle
        for b in resources:
            if not refs[b] or not sealed[b]:
                raise LedgerError(f"{self.kind} {b} cannot be shared: it is not sealed and held")
            what.append(b)
            refs[b] += 1
            idle.pop(b, None)

    def seal(self, resource: int) -> None:
        """Mark a resource as never to be written again."""
        self.sealed[resource] = 1

    def launched(self, resources: Iterable[int], step: int) -> None:
        """Remember that ``step`` was the newest launched over ``resources``: their fence."""
        last = self.last_step
        for b in resources:
            if last[b] < step:
                last[b] = step

    def drop(self, holder: Holder) -> Dropped:
        """End every hold of ``holder``. Dropping one that holds nothing is no error."""
        what = self._holds.pop(holder, None)
        if what is None:
            return Dropped()
        refs, cached = self.refs, self.cached
        freed = kept = lent = 0
        is_cache = holder[0] == CACHE
        # Newest first: the tail of a prefix becomes idle, and is evicted, before its head.
        for b in reversed(what):
            left = refs[b] - 1
            refs[b] = left
            if is_cache:
                cached[b] = 0
                self._idle.pop(b, None)
            if left < 0:
                raise LedgerError(f"{self.kind} {b} dropped by {holder} was free already")
            if left == 0:
                self._free.append(b)
                freed += 1
            elif left == 1 and cached[b]:
                self._idle[b] = None
                kept += 1
            else:
                lent += 1
        return Dropped(freed, kept, lent)

    # --- proof ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``LedgerError`` unless every invariant holds. O(edges)."""
        edges = [0] * self.total
        by_cache = [0] * self.total
        for holder, what in self._holds.items():
            if len(set(what)) != len(what):
                raise LedgerError(f"{holder} holds a {self.kind} twice")
            for b in what:
                edges[b] += 1
                by_cache[b] += holder[0] == CACHE
        free = set(self._free)
        if len(free) != len(self._free):
            raise LedgerError(f"a {self.kind} is free twice")
        for b in range(self.total):
            if edges[b] != self.refs[b]:
                raise LedgerError(f"{self.kind} {b}: {self.refs[b]} counted, {edges[b]} edges")
            if (edges[b] == 0) != (b in free):
                raise LedgerError(f"{self.kind} {b}: {edges[b]} edges, free is {b in free}")
            if by_cache[b] != self.cached[b]:
                raise LedgerError(f"{self.kind} {b}: the cache's edge is not what is recorded")
            if (edges[b] == by_cache[b] == 1) != (b in self._idle):
                raise LedgerError(f"{self.kind} {b}: idle is {b in self._idle}")
            if not self.sealed[b] and (edges[b] > 1 or by_cache[b]):
                raise LedgerError(f"{self.kind} {b} is mutable and shared")
        if self.free + self.idle + self.held != self.total:
            raise LedgerError(f"{self.kind}: free + cached + held is not {self.total}")


class Ledger:
    """All pools of one rank, by kind. ``drop`` is the one exit."""

    __slots__ = ("pools",)

    def __init__(self, totals: Mapping[str, int]) -> None:
        self.pools = {kind: Pool(kind, total) for kind, total in totals.items()}

    @property
    def blocks(self) -> Pool:
        """The pool of device KV blocks."""
        return self.pools[BLOCKS]

    def hold(self, holder: Holder, kind: str, resource: int) -> None:
        """Add an edge from ``holder`` to a held, sealed resource of ``kind``."""
        self.pools[kind].hold(holder, resource)

    def drop(self, holder: Holder) -> Dropped:
        """End every hold of ``holder`` in every pool; the counts are of device blocks."""
        dropped = Dropped()
        for kind, pool in self.pools.items():
            gone = pool.drop(holder)
            if kind == BLOCKS:
                dropped = gone
        return dropped

    def check(self) -> None:
        """Raise ``LedgerError`` unless every pool keeps its invariants."""
        for pool in self.pools.values():
            pool.check()
