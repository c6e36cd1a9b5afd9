"""The arithmetic of a bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """What a few measurements of one thing say."""

    p50: float
    p99: float
    max: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        """Rounded, for people and for JSON."""
        return {
            "p50": round(self.p50, 4),
            "p99": round(self.p99, 4),
            "max": round(self.max, 4),
            "n": self.n,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the least value that ``share`` of all do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no measurements")
    rank = -(-share * len(ordered) // 1)  # ceil
    return ordered[max(0, min(len(ordered) - 1, int(rank) - 1))]


def spread(values: Sequence[float]) -> Spread:
    """Median, 99th percentile and maximum. Raises ``ValueError`` for no values."""
    return Spread(percentile(values, 0.5), percentile(values, 0.99), max(values), len(values))


def ratio(value: float | None, base: float | None) -> float | None:
    """``value / base``, or None where one is missing or the base is 0."""
    if value is None or not base:
        return None
    return round(value / base, 3)


def leaves(document: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    """The numbers of a nested document by their path."""
    if isinstance(document, Mapping):
        found: dict[tuple[str, ...], float] = {}
        for key, value in document.items():
            found.update(leaves(value, (*path, str(key))))
        return found
    if isinstance(document, (int, float)) and not isinstance(document, bool):
        return {path: float(document)}
    return {}


def ratios(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """For each server, its figures over the first one's, by dotted path.

    Only what both have is compared; counts (``n``) are left out.
    """
    if not figures:
        return []
    base = leaves(figures[0])
    result = []
    for each in figures:
        own = leaves(each)
        result.append(
            {
                ".".join(path): ratio(own[path], base[path])
                for path in base
                if path in own and path[-1] != "n"
            }
        )
    return result
