"""Where chance comes from: a seeded stream, or every possible stream one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Chooser:
    """A source of choices. ``below`` is the only one that an implementation makes."""

    def below(self, n: int) -> int:
        """One of ``0 .. n - 1``."""
        raise NotImplementedError

    def between(self, low: int, high: int) -> int:
        """One of ``low .. high``, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        """Whether something happens that happens in ``percent`` of 100 cases."""
        return percent > 0 and self.below(100) < percent

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return options[self.below(len(options))]


class Seeded(Chooser):
    """Choices of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, n: int) -> int:
        return self._random.randrange(n)


class Exhaustive(Chooser):
    """Every sequence of choices in lexicographic order, behind the same interface.

    ``while it.next(): run(it)`` runs once for each sequence; a run may have any length, and what it
    asks may depend on what it got. After "exhaustigen" (matklad, TigerBeetle).
    """

    def __init__(self) -> None:
        self._path: list[list[int]] = []  # [choice, number of options]
        self._at = 0
        self._started = False

    def next(self) -> bool:
        """Go to the next sequence; False when there is none left."""
        if not self._started:
            self._started = True
            return True
        del self._path[self._at :]  # the last run ended before it used these
        while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
            self._path.pop()
        self._at = 0
        if not self._path:
            return False
        self._path[-1][0] += 1
        return True

    @property
    def fresh(self) -> bool:
        """Whether this run has left the prefix that an earlier run went already."""
        return self._at >= len(self._path)

    @property
    def path(self) -> list[int]:
        """The choices made so far in this run, for a report."""
        return [choice for choice, _ in self._path[: self._at]]

    def below(self, n: int) -> int:
        if self._at == len(self._path):
            self._path.append([0, n])
        choice, options = self._path[self._at]
        if options != n:
            raise AssertionError(f"a replay chose of {n} where it chose of {options} before")
        self._at += 1
        return choice
