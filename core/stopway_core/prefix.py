"""The prefix cache: which sealed block holds the KV of which tokens after which prefix.

A key is (entry of the block before, the tokens of this block). Entries are numbered and never
reused, so a match is exact: there is no hash to collide, and a block that was evicted and filled
anew cannot be reached by an old key. A tenant's salt names its root, so tenants share nothing.
"""

from __future__ import annotations

from stopway_core.ledger import CACHE, Ledger

Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """An index over blocks that the ledger's ``cache`` holders keep."""

    def __init__(self, ledger: Ledger, block_size: int) -> None:
        self._ledger = ledger
        self._block_size = block_size
        self._next_entry = 1
        self._roots: dict[str, int] = {}
        self._entries: dict[Key, tuple[int, int]] = {}  # key -> (entry, block)
        self._by_block: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, salt: str) -> int:
        """The entry that stands before the first block of everything salted with ``salt``."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._number()
        return root

    def match(self, salt: str, tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        """The longest cached prefix of ``tokens[:limit]``, in whole blocks.

        Returns the blocks, first to last, and the root with the entry of each block after it.
        """
        size = self._block_size
        entry = self.root(salt)
        entries = [entry]
        blocks: list[int] = []
        for start in range(0, limit - size + 1, size):
            found = self._entries.get((entry, tuple(tokens[start : start + size])))
            if found is None:
                break
            entry = found[0]
            entries.append(entry)
            blocks.append(found[1])
        return blocks, entries

    def insert(self, entry: int, tokens: tuple[int, ...], block: int) -> int:
        """Cache a sealed block that follows ``entry``; returns its entry for the block after it.

        When the same tokens are cached there already, the block stays its request's alone and the
        entry that exists is returned.
        """
        key = (entry, tokens)
        found = self._entries.get(key)
        if found is not None:
            return found[0]
        number = self._number()
        self._ledger.blocks.hold((CACHE, number), block)
        self._entries[key] = (number, block)
        self._by_block[block] = key
        return number

    def evict(self, count: int) -> None:
        """Forget the ``count`` idle blocks that were used longest ago; they become free."""
        pool = self._ledger.blocks
        for _ in range(count):
            block = pool.oldest_idle()
            entry, _ = self._entries.pop(self._by_block.pop(block))
            self._ledger.drop((CACHE, entry))

    def _number(self) -> int:
        number = self._next_entry
        self._next_entry += 1
        return number
