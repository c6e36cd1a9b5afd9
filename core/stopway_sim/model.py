"""A model without weights whose next token depends on every KV cell that it reads.

A cell is what one rank stores for one position: a hash of the hidden state that comes into its
stage. A rank's output at a position hashes all its cells up to there; the ranks of a stage add
theirs up (the all-reduce), and the sum is the hidden state of the next stage. So one stale, foreign
or missing cell on any rank changes every token after it.

``hash`` of tuples of integers depends on neither the process nor PYTHONHASHSEED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MASK = (1 << 61) - 1


def embed(token: int, position: int) -> int:
    """The hidden state that enters the first stage."""
    return hash((token, position, 0x5EED)) & _MASK


def cell(hidden: int, stage: int, tensor_index: int) -> int:
    """What a rank writes for a position."""
    return hash((hidden, stage, tensor_index)) & _MASK


def attend(cells: Sequence[int]) -> int:
    """A rank's share of a stage's output at the last of ``cells``' positions."""
    return hash(tuple(cells)) & _MASK


def reduce(shares: Sequence[int]) -> int:
    """The hidden state after a stage."""
    return sum(shares) & _MASK


def sample(hidden: int, vocab: int) -> int:
    """The greedy token."""
    return (hidden >> 7) % vocab


class Memory:
    """The KV slots of one rank: ``blocks`` x ``size``, garbage at first."""

    def __init__(self, blocks: int, size: int, rank: int) -> None:
        self._size = size
        self.slots = [-1 - slot - 1_000_000 * rank for slot in range(blocks * size)]

    def write(self, table: Sequence[int], start: int, cells: Sequence[int]) -> None:
        """Store ``cells`` at positions ``start ...`` of a block table."""
        size, slots = self._size, self.slots
        for position, value in enumerate(cells, start):
            slots[table[position // size] * size + position % size] = value

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block."""
        size, slots = self._size, self.slots
        slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]

    def read(self, table: Sequence[int], count: int) -> list[int]:
        """The cells of the first ``count`` positions of a block table."""
        size, slots = self._size, self.slots
        cells: list[int] = []
        for index in range(-(-count // size)):
            at = table[index] * size
            cells.extend(slots[at : at + size])
        return cells[:count]


class Solo:
    """The undisturbed greedy run of one prompt, alone and from an empty cache.

    ``choose`` is what a grammar makes of the token that the model wants at a place of the output;
    below zero it allows none, and the run ends.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        tensor: int,
        pipeline: int,
        vocab: int,
        choose: Callable[[int, int, int], int] | None = None,
    ) -> None:
        self._vocab = vocab
        self._choose = choose
        self._ended = False
        self._fed = 0
        self._hidden = 0  # after the last token fed
        self._prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.cells: list[list[list[int]]] = [[[] for _ in range(tensor)] for _ in range(pipeline)]

    def output(self, count: int) -> list[int]:
        """The first ``count`` tokens after the prompt; fewer where its grammar allows no more."""
        while len(self.tokens) < self._prompt_len + count and not self._ended:
            self.prefill(len(self.tokens))
            token = sample(self._hidden, self._vocab)
            if self._choose is not None:
                token = self._choose(token, len(self.tokens) - self._prompt_len, self._vocab)
            self._ended = token < 0
            if not self._ended:
                self.tokens.append(token)
        return self.tokens[self._prompt_len : self._prompt_len + count]

    def prefill(self, count: int) -> None:
        """Make sure that the cells of the first ``count`` tokens are there."""
        while self._fed < count:
            self._feed_one()

    def _feed_one(self) -> None:
        position = self._fed
        hidden = embed(self.tokens[position], position)
        for stage, shards in enumerate(self.cells):
            shares = []
            for index, cells in enumerate(shards):
                cells.append(cell(hidden, stage, index))
                shares.append(attend(cells))
            hidden = reduce(shares)
        self._fed += 1
        self._hidden = hidden
