"""Many worlds at once, one process for each core."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from stopway_sim.failure import SimFailure
from stopway_sim.world import run_seed

CHUNK = 20  # worlds that a process takes at a time


@dataclass(slots=True)
class Runs:
    """What a number of worlds came to."""

    digests: dict[int, str] = field(default_factory=dict)  # by seed
    failed: dict[int, str] = field(default_factory=dict)
    coverage: Counter[str] = field(default_factory=Counter)


def run_many(first: int, count: int, workers: int = 0) -> Runs:
    """Run the worlds of ``count`` seeds from ``first`` on; ``workers`` 0 is one for each core."""
    runs = Runs()
    seeds = range(first, first + count)
    workers = min(workers or os.cpu_count() or 1, -(-count // CHUNK))
    for seed, digest, failure, coverage in _results(seeds, workers):
        if failure:
            runs.failed[seed] = failure
        else:
            runs.digests[seed] = digest
        runs.coverage.update(coverage)
    return runs


_One = tuple[int, str, str, Counter[str]]


def _results(seeds: Iterable[int], workers: int) -> Iterator[_One]:
    if workers < 2:
        yield from map(_run, seeds)
        return
    # Not forked: a caller may have threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run, seeds, chunksize=CHUNK)


def _run(seed: int) -> _One:
    try:
        report = run_seed(seed)
    except SimFailure as failure:
        return seed, "", str(failure), Counter()
    return seed, report.fingerprint, "", report.coverage
