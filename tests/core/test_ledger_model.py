"""The ledger against a model that is sets and nothing else."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stopway_core.ledger import (
    BLOCKS,
    CACHE,
    REQUEST,
    Dropped,
    Ledger,
    LedgerError,
    OutOfResources,
    Pool,
)

TOTAL = 9


class LedgerMachine(RuleBasedStateMachine):
    """Random operations on both; after each, every count of the ledger is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger({BLOCKS: TOTAL, "slots": 2})
        self.pool = self.ledger.blocks
        self.held: dict[tuple[str, int], set[int]] = {}
        self.sealed: set[int] = set()
        self.fence: dict[int, int] = dict.fromkeys(range(TOTAL), 0)
        self.idle: list[int] = []  # longest idle first
        self.names = 0
        self.step = self.completed = 0

    def name(self, kind: str) -> tuple[str, int]:
        self.names += 1
        return kind, self.names

    def holders_of(self, block: int) -> set[tuple[str, int]]:
        return {holder for holder, blocks in self.held.items() if block in blocks}

    @property
    def free(self) -> set[int]:
        return set(range(TOTAL)) - set().union(*self.held.values())

    def others(self) -> list[tuple[str, int]]:
        return [holder for holder in self.held if holder[0] != CACHE]

    def take(self, holder: tuple[str, int], blocks: list[int], count: int) -> None:
        assert len(blocks) == len(set(blocks)) == count
        assert set(blocks) <= self.free
        self.held.setdefault(holder, set()).update(blocks)
        self.sealed -= set(blocks)

    @rule(count=st.integers(0, 4))
    def acquire(self, count: int) -> None:
        holder = self.name(REQUEST)
        if count > len(self.free):
            with pytest.raises(OutOfResources):
                self.pool.acquire(holder, count)
            return
        self.take(holder, self.pool.acquire(holder, count), count)

    @precondition(lambda self: self.others())
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.others()))
        if self.free:
            self.take(holder, self.pool.acquire(holder, 1), 1)

    @rule(count=st.integers(1, 3))
    def acquire_unordered(self, count: int) -> None:
        holder = self.name("host")
        ready = {b for b in self.free if self.fence[b] <= self.completed}
        if count > len(ready):
            with pytest.raises(OutOfResources):
                self.pool.acquire_unordered(holder, count, self.completed)
            return
        blocks = self.pool.acquire_unordered(holder, count, self.completed)
        assert set(blocks) <= ready
        self.take(holder, blocks, count)

    @precondition(lambda self: self.others())
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.others()))
        self.step += 1
        self.pool.launched(self.held[holder], self.step)
        self.fence.update(dict.fromkeys(self.held[holder], self.step))

    @precondition(lambda self: self.completed < self.step)
    @rule()
    def complete(self) -> None:
        self.completed += 1

    @precondition(lambda self: self.others())
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        blocks = sorted(set().union(*(self.held[h] for h in self.others())))
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.pool.seal(block)
            self.sealed.add(block)

    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        able = [
            b
            for b in sorted(self.sealed - self.free)
            if not any(h[0] == CACHE for h in self.holders_of(b))
        ]
        if able:
            block, holder = data.draw(st.sampled_from(able)), self.name(CACHE)
            self.ledger.hold(holder, BLOCKS, block)
            self.held[holder] = {block}
            with pytest.raises(LedgerError):  # the cache has one edge to a block, not two
                self.ledger.hold(self.name(CACHE), BLOCKS, block)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        able = sorted(self.sealed - self.free)
        if able:
            blocks = data.draw(st.lists(st.sampled_from(able), unique=True, max_size=4))
            holder = self.name(REQUEST)
            self.pool.share(holder, blocks)
            self.held[holder] = set(blocks)
            self.idle = [b for b in self.idle if b not in blocks]

    @rule(data=st.data())
    def hold_what_is_not_sealed(self, data: st.DataObject) -> None:
        unable = sorted(set(range(TOTAL)) - self.sealed | self.free)
        if unable:
            with pytest.raises(LedgerError):
                self.pool.hold(self.name("transfer"), data.draw(st.sampled_from(unable)))

    @precondition(lambda self: self.others())
    @rule(data=st.data())
    def hold_twice(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.others()))
        able = sorted(self.held[holder] & self.sealed)
        if able:
            with pytest.raises(LedgerError):
                self.pool.hold(holder, data.draw(st.sampled_from(able)))

    @precondition(lambda self: self.others())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.others()))
        order = self.pool.holds(holder)
        blocks = self.held.pop(holder)
        left = {b: self.holders_of(b) for b in blocks}
        free = sum(not who for who in left.values())
        idle = [b for b in reversed(order) if [h[0] for h in left[b]] == [CACHE]]
        assert self.ledger.drop(holder) == Dropped(free, len(idle), len(blocks) - free - len(idle))
        assert self.ledger.drop(holder) == Dropped()  # a second time ends nothing
        self.idle += idle

    @precondition(lambda self: self.idle)
    @rule()
    def evict(self) -> None:
        block = self.pool.oldest_idle()
        assert block == self.idle.pop(0)
        (entry,) = self.holders_of(block)
        assert self.ledger.drop(entry) == Dropped(freed=1)
        del self.held[entry]

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        cached = {b for h, blocks in self.held.items() if h[0] == CACHE for b in blocks}
        others = set().union(*(self.held[h] for h in self.others()))
        assert (self.pool.free, self.pool.idle, self.pool.held) == (
            len(self.free),
            len(cached - others),
            len(others),
        )
        assert [self.pool.refs[b] for b in range(TOTAL)] == [
            len(self.holders_of(b)) for b in range(TOTAL)
        ]
        for holder, blocks in self.held.items():
            listed = self.pool.holds(holder)
            assert len(listed) == len(blocks) and set(listed) == blocks
        for holder in self.others():
            alone = [
                b for b in self.held[holder] if not self.holders_of(b) - {holder} - self.caches
            ]
            assert self.pool.exclusive(holder) == len(alone)

    @property
    def caches(self) -> set[tuple[str, int]]:
        return {holder for holder in self.held if holder[0] == CACHE}


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def pool(total: int = 4) -> Pool:
    return Pool(BLOCKS, total)


def test_check_finds_a_block_listed_twice_by_one_holder() -> None:
    p = pool()
    p.acquire((REQUEST, 1), 2)
    p._holds[REQUEST, 1].append(p._holds[REQUEST, 1][0])
    with pytest.raises(LedgerError, match="twice"):
        p.check()


def test_check_finds_a_block_that_is_free_twice() -> None:
    p = pool()
    p._free.append(p._free[0])
    with pytest.raises(LedgerError, match="free twice"):
        p.check()


def test_check_finds_a_block_freed_under_its_holder() -> None:
    p = pool()
    (block,) = p.acquire((REQUEST, 1), 1)
    p._free.append(block)
    with pytest.raises(LedgerError, match="free is True"):
        p.check()


def test_check_finds_a_mutable_block_with_two_holders() -> None:
    p = pool()
    (block,) = p.acquire((REQUEST, 1), 1)
    p.seal(block)
    p.share((REQUEST, 2), [block])
    p.sealed[block] = 0
    with pytest.raises(LedgerError, match="mutable and shared"):
        p.check()


def test_a_block_whose_holder_is_dropped_behind_the_ledgers_back_is_found() -> None:
    p = pool()
    p.acquire((REQUEST, 1), 1)
    p.refs[0] = 0
    with pytest.raises(LedgerError, match="was free already"):
        p.drop((REQUEST, 1))


def test_sharing_for_a_holder_that_has_something_is_refused() -> None:
    p = pool()
    (block,) = p.acquire((REQUEST, 1), 1)
    p.seal(block)
    with pytest.raises(LedgerError, match="already"):
        p.share((REQUEST, 1), [block])


def test_unordered_use_waits_for_the_step_that_ordered_use_need_not_wait_for() -> None:
    p = pool(1)
    p.launched(p.acquire((REQUEST, 1), 1), 5)
    p.drop((REQUEST, 1))
    with pytest.raises(OutOfResources, match="fence"):
        p.acquire_unordered(("host", 1), 1, completed_step=4)
    assert p.acquire((REQUEST, 2), 1) == [0]
    p.drop((REQUEST, 2))
    assert p.acquire_unordered(("host", 1), 1, completed_step=5) == [0]


def test_one_drop_ends_holds_in_every_pool() -> None:
    ledger = Ledger({BLOCKS: 2, "adapters": 2})
    ledger.pools["adapters"].acquire((REQUEST, 1), 1)
    ledger.blocks.acquire((REQUEST, 1), 2)
    assert ledger.drop((REQUEST, 1)) == Dropped(freed=2)
    assert ledger.pools["adapters"].free == 2
    ledger.check()


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    p = pool()
    head, tail = p.acquire((REQUEST, 1), 2)
    for entry, block in enumerate((head, tail)):
        p.seal(block)
        p.hold((CACHE, entry), block)
    p.drop((REQUEST, 1))
    assert p.oldest_idle() == tail
