"""Stopway's own policy: waste the least work, and never evict what frees nothing."""

from __future__ import annotations

from collections.abc import Sequence

from stopway_core.policy import Candidate, Policy


def least_wasted_work(candidates: Sequence[Candidate], short: int) -> Candidate | None:
    """The victim that alone frees ``short`` blocks for the fewest tokens to compute again.

    When none frees enough alone, the one that frees the most per recomputed token. Younger goes
    before older where they are equal.
    """
    useful = [c for c in candidates if c.frees > 0]
    if not useful:
        return None
    enough = [c for c in useful if c.frees >= short]
    if enough:
        return min(enough, key=lambda c: (c.recompute, -c.arrival))
    return min(useful, key=lambda c: (c.recompute / c.frees, -c.arrival))


NATIVE = Policy(name="native", victim=least_wasted_work)
