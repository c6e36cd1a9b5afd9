"""From a command line to a fleet and a workload: what is not given is the scenario's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_core.types import Deadlines
from stopway_sim.fleet import (
    SCENARIOS,
    CostModel,
    FleetConfig,
    FleetError,
    HostLoads,
    Lengths,
    RankLost,
    Spec,
    Storm,
    Workload,
    read_trace,
)
from stopway_sim.fleet.limits import finite

GROUPS, REQUESTS = 4, 1000


@dataclass(frozen=True, slots=True)
class Options:
    """What was given; ``None``, empty or False is "not given"."""

    scenario: str = ""
    groups: int | None = None
    split: bool = False
    cost: Path | None = None
    cost_fields: tuple[str, ...] = ()
    requests: int | None = None
    rate: float | None = None
    clients: int | None = None
    think_s: float | None = None
    prompt: str = ""
    output: str = ""
    shared: float | None = None
    prefixes: int | None = None
    prefix_tokens: int | None = None
    follow_ups: float | None = None
    priorities: tuple[str, ...] = ()
    choices: str = ""
    trace: Path | None = None
    deadlines: tuple[float | None, float | None, float | None] = (None, None, None)
    cancel: float | None = None
    cancel_after_s: float | None = None
    cancel_after_tokens: float | None = None
    disconnects: float | None = None
    storms: tuple[str, ...] = ()
    lose_rank: tuple[str, ...] = ()
    redis_down: tuple[str, ...] = ()
    host_loads: str = ""
    check: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be simulated, for each policy alike."""

    name: str
    about: str
    fleet: FleetConfig
    workload: Workload
    trace: list[Spec] | None


def plan(options: Options) -> Plan:
    """Read the files and check everything. Raises ``FleetError`` that says what to change."""
    name, about = options.scenario or "custom", "as given on the command line"
    groups = GROUPS if options.groups is None else options.groups
    requests = REQUESTS if options.requests is None else options.requests
    fleet, workload = FleetConfig(groups=groups), Workload(requests=requests)
    if options.scenario:
        scenario = SCENARIOS.get(options.scenario)
        if scenario is None:
            raise FleetError(
                f"{options.scenario!r} is no scenario; choose one of {', '.join(SCENARIOS)}"
            )
        about = scenario.about
        fleet, workload = scenario.plan(groups, requests)
    fleet = replace(fleet, **_fleet(options, fleet))
    workload = replace(workload, **_workload(options, workload))
    trace: list[Spec] | None = None
    if options.trace is not None:
        lines = _text(options.trace).splitlines()
        trace = read_trace(lines, options.trace.name, fleet.cost.max_model_len)
        name, about = options.trace.name, "arrivals and cancels of a file"
    return Plan(name, about, fleet, workload, trace)


def policy_named(name: str) -> Policy:
    """Raises ``FleetError`` for a name that is none."""
    policy = POLICIES.get(name)
    if policy is None:
        raise FleetError(f"{name!r} is no policy; choose one of {', '.join(POLICIES)}")
    return policy


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _fleet(options: Options, base: FleetConfig) -> dict[str, Any]:
    cost = base.cost
    if options.cost is not None:
        cost = CostModel.loads(_text(options.cost))
    if options.cost_fields:
        cost = CostModel.from_json({**cost.to_json(), **dict(map(_field, options.cost_fields))})
    found: dict[str, Any] = {"cost": cost}
    if options.split:
        found["split"] = True
    if options.check:
        found["checked"] = options.check
    if options.host_loads:
        per_s, blocks, seconds = _numbers(
            "--host-loads", options.host_loads, "PER_S:BLOCKS:SECONDS"
        )
        found["host_loads"] = HostLoads(per_s, _whole("--host-loads", "BLOCKS", blocks), seconds)
    if options.lose_rank:
        lost = [_numbers("--lose-rank", text, "AT:GROUP:DOWN_S") for text in options.lose_rank]
        found["faults"] = tuple(
            RankLost(at, _whole("--lose-rank", "GROUP", group), down) for at, group, down in lost
        )
    if options.redis_down:
        down = [_numbers("--redis-down", text, "FROM:TO") for text in options.redis_down]
        found["redis_down"] = tuple((start, end) for start, end in down)
    return found


def _workload(options: Options, base: Workload) -> dict[str, Any]:
    found = _given(
        rate=options.rate,
        clients=options.clients,
        think_s=options.think_s,
        shared=options.shared,
        prefixes=options.prefixes,
        prefix_tokens=options.prefix_tokens,
        follow_ups=options.follow_ups,
    )
    for name in ("prompt", "output", "choices"):
        if getattr(options, name):
            found[name] = Lengths.parse(getattr(options, name))
    cancels = _given(
        share=options.cancel,
        after_s=options.cancel_after_s,
        after_tokens=options.cancel_after_tokens,
        disconnects=options.disconnects,
    )
    if cancels:
        found["cancels"] = replace(base.cancels, **cancels)
    if options.storms:
        storms = [_numbers("--storm", text, "AT:SHARE") for text in options.storms]
        found["storms"] = tuple(Storm(at, share) for at, share in storms)
    if options.priorities:
        levels = [_numbers("--priority", text, "LEVEL:SHARE") for text in options.priorities]
        found["priorities"] = tuple(
            (_whole("--priority", "LEVEL", level), share) for level, share in levels
        )
    if any(seconds is not None for seconds in options.deadlines):
        found["deadlines"] = Deadlines(*options.deadlines)
    return found


def _numbers(option: str, text: str, form: str) -> list[float]:
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != form.count(":") + 1:
        raise FleetError(f"{option} {text!r}: write it as {form}, in numbers")
    return [
        finite(f"{option} {text!r}: {name}", number)
        for name, number in zip(form.split(":"), numbers, strict=True)
    ]


def _whole(option: str, name: str, number: float) -> int:
    if not number.is_integer():
        raise FleetError(f"{option}: {name} is {number:g}; give a whole number")
    return int(number)


def _field(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        what = f"{value!r} is no number" if found else "there is no ="
        raise FleetError(f"--cost-field {text!r}: {what}; write NAME=VALUE") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path} cannot be read: {error}") from None
