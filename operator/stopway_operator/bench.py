"""``python -m stopway_operator.bench``: what 1,000 services of 8 groups cost the operator.

It brings one service to rest in the simulated cluster, then plans as many of its kind, and prints
the time of a plan and the writes to the API server: at rest, for a new service, for a rollout.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from stopway_operator.objects import Obj
from stopway_operator.observed import Observed
from stopway_operator.plan import plan
from stopway_operator.simulation import TOKENS, Simulation

SPEC: Obj = {
    "model": {"uri": "builtin:smollm2"},
    "parallelism": {"tensor": 2, "pipeline": 2, "ranksPerPod": 2},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=8)
    options = parser.parse_args()
    simulation = Simulation(capacity={f"n{i}": 64 for i in range(8)})
    simulation.create("chat", {**SPEC, "replicas": options.groups})
    while not (simulation.reconcile().idle and simulation.plan().requeue_s is None):
        simulation.tick()
    created = simulation.writes
    measure("at rest", simulation, simulation.observe(), options.services)
    fresh = replace(simulation.observe(), objects={}, pods=(), secrets={})
    measure("new", simulation, fresh, options.services)
    simulation.change(podTemplate={"image": "next"})
    simulation.settle()
    print(
        f"one service of {options.groups} groups: {created} writes to create it, "
        f"{simulation.writes - created} to roll it out"
    )


def measure(what: str, simulation: Simulation, observed: Observed, services: int) -> None:
    """Plan ``services`` times."""
    writes = statuses = 0
    started = time.perf_counter()
    for _ in range(services):
        planned = plan(observed, simulation.config, simulation.now, TOKENS)
        writes += len(planned.writes)
        statuses += planned.status is not None
    seconds = time.perf_counter() - started
    print(
        f"{what}: {services} services x {observed.service['spec']['replicas']} groups: "
        f"{seconds:.2f} s, {seconds / services * 1000:.2f} ms and "
        f"{(writes + statuses) / services:g} API writes a reconcile"
    )


if __name__ == "__main__":
    main()
