"""Runs a fleet: routes, simulates each cell, adds up; in several processes when asked.

Cells share nothing but the routing, so the report does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace

from stopway_sim.failure import require
from stopway_sim.fleet.cell import Cell
from stopway_sim.fleet.config import FleetConfig
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import COUNT_MAX
from stopway_sim.fleet.report import Report
from stopway_sim.fleet.routing import route
from stopway_sim.fleet.tally import Tally
from stopway_sim.fleet.workload import Drawer, Spec, Workload, open_loop

Progress = Callable[[int, int], None]
"""(requests done, requests in all), now and then."""


def check_input(
    config: FleetConfig, workload: Workload, seed: int, trace: Sequence[Spec] | None = None
) -> None:
    """Raises ``FleetError`` for what cannot be simulated together."""
    if not 0 <= seed < 1 << 30:
        raise FleetError(f"the seed is {seed}; give 0 to {(1 << 30) - 1}")
    if trace is not None and len(trace) > COUNT_MAX:
        raise FleetError(f"a trace of {len(trace)} requests; give at most {COUNT_MAX}")
    one = workload.one_choice if trace is None else all(spec.choices == 1 for spec in trace)
    if config.split and not one:
        raise FleetError("with --split every request has 1 choice: a transfer is of one")


def simulate(
    config: FleetConfig,
    workload: Workload,
    seed: int,
    *,
    trace: Sequence[Spec] | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Run ``workload`` (or the requests of ``trace``, with its storms and deadlines).

    Raises ``FleetError`` for what cannot be simulated and ``SimFailure`` when the books do not
    balance at the end: a bug.
    """
    check_input(config, workload, seed, trace)
    closed = trace is None and workload.clients > 0
    if closed:
        parts: list[list[Spec]] = [[] for _ in range(config.cells)]
        total = workload.requests
    else:
        drawer = Drawer(workload, seed, config.cost.max_model_len)
        specs = open_loop(drawer) if trace is None else trace
        parts = route(config, specs)
        total = len(specs)
        workload = replace(workload, clients=0)
    tallies: dict[int, Tally] = {}
    done = 0
    for index, tally in _run_cells(config, workload, seed, parts, processes):
        tallies[index] = tally
        done += sum(tally.outcomes.values())
        if progress is not None:
            progress(done, total)
    whole = Tally()
    for index in range(config.cells):
        whole.add(tallies[index])
    _check(whole, total)
    return Report(config.policy.name, seed, config.groups, total, whole)


def _run_cells(
    config: FleetConfig,
    workload: Workload,
    seed: int,
    parts: list[list[Spec]],
    processes: int,
) -> Iterator[tuple[int, Tally]]:
    if processes <= 1 or len(parts) == 1:
        for index, specs in enumerate(parts):
            yield index, run_cell(index, config, workload, seed, specs)
        return
    context = multiprocessing.get_context("spawn")  # the caller may have threads
    with ProcessPoolExecutor(min(processes, len(parts)), context) as pool:
        futures: dict[Future[Tally], int] = {
            pool.submit(run_cell, index, config, workload, seed, specs): index
            for index, specs in enumerate(parts)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


def run_cell(
    index: int, config: FleetConfig, workload: Workload, seed: int, specs: Sequence[Spec]
) -> Tally:
    """One cell from its start to its rest."""
    return Cell(index, config, workload, seed).run(specs)


def _check(tally: Tally, total: int) -> None:
    ended = sum(tally.outcomes.values())
    require(ended == total, f"{total} requests have {ended} outcomes")
    require(not tally.counts["alive_at_end"], "planners keep requests that have ended")
    require(not tally.counts["held_at_end"], "blocks are held after the last request")
