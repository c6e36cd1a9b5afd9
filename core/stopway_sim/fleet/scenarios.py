"""Named fleets in which policies differ, each with what it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stopway_sim.fleet.config import FleetConfig, HostLoads
from stopway_sim.fleet.cost import CostModel
from stopway_sim.fleet.workload import Cancels, Lengths, Storm, Workload

Plan = tuple[FleetConfig, Workload]


@dataclass(frozen=True, slots=True)
class Scenario:
    """``plan(groups, requests)`` gives fleet and workload; rates are per group."""

    name: str
    about: str
    plan: Callable[[int, int], Plan]


def _cancel_storm(groups: int, requests: int) -> Plan:
    rate = 12.0 * groups
    storms = tuple(Storm(requests / rate * part, 0.6) for part in (0.3, 0.6, 0.9))
    return (
        FleetConfig(groups=groups, host_loads=HostLoads(per_s=5.0)),
        Workload(
            requests=requests,
            rate=rate,
            prompt=Lengths("lognormal", (256, 0.8)),
            output=Lengths("lognormal", (256, 0.7)),
            shared=0.5,
            cancels=Cancels(share=0.15, after_s=3.0),
            storms=storms,
        ),
    )


def _memory_pressure(groups: int, requests: int) -> Plan:
    cost = CostModel(blocks=1024, max_model_len=4096, window=2)  # steps overlap
    return (
        FleetConfig(groups=groups, cost=cost, host_loads=HostLoads(per_s=20.0, blocks=8)),
        Workload(
            requests=requests,
            rate=4.5 * groups,
            prompt=Lengths("lognormal", (256, 0.6)),
            output=Lengths("lognormal", (448, 0.5)),
            follow_ups=0.3,
            cancels=Cancels(share=0.25, after_s=4.0),
        ),
    )


def _long_prompts(groups: int, requests: int) -> Plan:
    cost = CostModel(blocks=16_384, max_model_len=32_768)
    return (
        FleetConfig(groups=groups, cost=cost, host_loads=HostLoads(per_s=5.0)),
        Workload(
            requests=requests,
            rate=1.6 * groups,
            prompt=Lengths("lognormal", (12_000, 0.5)),
            output=Lengths("lognormal", (64, 0.5)),
            cancels=Cancels(share=0.4, after_s=0.4),
        ),
    )


def _pd_split(groups: int, requests: int) -> Plan:
    return (
        FleetConfig(groups=groups, split=True),
        Workload(
            requests=requests,
            rate=4.0 * groups,
            prompt=Lengths("lognormal", (1024, 0.6)),
            output=Lengths("lognormal", (192, 0.6)),
            cancels=Cancels(share=0.3, after_s=1.0),
        ),
    )


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "cancel-storm",
            "busy groups, 15 % of requests given up one by one, and three times 60 % of all alive",
            _cancel_storm,
        ),
        Scenario(
            "memory-pressure",
            "few blocks, long answers, conversations, host loads: preemption and early frees",
            _memory_pressure,
        ),
        Scenario(
            "long-prompts",
            "prompts of 12,000 tokens, 40 % given up within their prefill",
            _long_prompts,
        ),
        Scenario(
            "pd-split",
            "pairs of a prefill and a decode group, KV transfers of tens of milliseconds",
            _pd_split,
        ),
    )
}
