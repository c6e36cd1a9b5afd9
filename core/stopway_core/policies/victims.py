"""Whom to preempt. Each takes candidates of one priority and the blocks that are short."""

from __future__ import annotations

from collections.abc import Sequence

from stopway_core.policy import Candidate


def least_wasted_work(candidates: Sequence[Candidate], short: int) -> Candidate | None:
    """The victim that alone frees ``short`` blocks for the fewest tokens to compute again.

    When none frees enough alone, the one that frees the most per recomputed token. Younger goes
    before older where they are equal.
    """
    enough = [c for c in candidates if c.frees >= short]
    if enough:
        return min(enough, key=lambda c: (c.recompute, -c.arrival))
    return min(candidates, key=lambda c: (c.recompute / c.frees, -c.arrival), default=None)


def latest(candidates: Sequence[Candidate], short: int) -> Candidate | None:
    """The tail of the running queue: who came last."""
    return max(candidates, key=lambda c: c.arrival, default=None)


def fewest_outputs(candidates: Sequence[Candidate], short: int) -> Candidate | None:
    """Fewest output tokens; of those with as many, the longest prompt, then who started last."""
    return min(candidates, key=lambda c: (c.output_len, -c.prompt_len, -c.rid), default=None)


def longest_output(candidates: Sequence[Candidate], short: int) -> Candidate | None:
    """Most output tokens; the younger of equals."""
    return max(candidates, key=lambda c: (c.output_len, c.arrival), default=None)


def nobody(candidates: Sequence[Candidate], short: int) -> Candidate | None:
    """Never preempts: new work waits."""
    return None
