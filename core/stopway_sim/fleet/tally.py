"""What is counted while a cell runs. Tallies of cells add up in the order of the cells."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

SERIES = ("first_token", "total", "detect", "notify", "effective", "reclaimed")


@dataclass(slots=True)
class Level:
    """Of the requests of one priority; ``first_token`` is in seconds, as in ``Tally.series``."""

    requests: int = 0
    finished: int = 0
    preemptions: int = 0
    first_token: array[float] = field(default_factory=lambda: array("d"))

    def add(self, other: Level) -> None:
        """Take in another cell's."""
        self.requests += other.requests
        self.finished += other.finished
        self.preemptions += other.preemptions
        self.first_token.extend(other.first_token)


@dataclass(slots=True)
class Tally:
    """Counts, and durations in seconds; ``Report`` says exactly what each is."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    series: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in SERIES}
    )
    levels: defaultdict[int, Level] = field(default_factory=lambda: defaultdict(Level))
    block_seconds: float = 0.0
    last_end_s: float = 0.0

    def add(self, other: Tally) -> None:
        """Take in another cell's."""
        self.outcomes.update(other.outcomes)
        self.reasons.update(other.reasons)
        self.counts.update(other.counts)
        for name, values in other.series.items():
            self.series[name].extend(values)
        for priority, level in other.levels.items():
            self.levels[priority].add(level)
        self.block_seconds += other.block_seconds
        self.last_end_s = max(self.last_end_s, other.last_end_s)
