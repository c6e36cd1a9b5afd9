"""From a command line to a fleet and a workload: what is not given is the scenario's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stopway_cli.idle import Idle, refuse
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
COMPARED, COMPARED_REQUESTS = "cancel-storm", 2000  # by ``compare``, unless a trace is

_IN_A_TRACE = (
    *("requests", "rate", "clients", "think", "prompt", "output", "priority", "choices"),
    *("shared", "prefixes", "prefix_tokens", "follow_ups"),
    *("cancel", "cancel_after", "cancel_after_tokens", "disconnects"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """What was given, each called as its option; the default is "not given"."""

    scenario: str = ""
    groups: int | None = None
    split: bool = False
    cost: Path | None = None
    cost_field: tuple[str, ...] = ()
    requests: int | None = None
    rate: float | None = None
    clients: int | None = None
    think: float | None = None
    prompt: str = ""
    output: str = ""
    shared: float | None = None
    prefixes: int | None = None
    prefix_tokens: int | None = None
    follow_ups: float | None = None
    priority: tuple[str, ...] = ()
    choices: str = ""
    trace: Path | None = None
    deadline_queue: float | None = None
    deadline_first_token: float | None = None
    deadline_total: float | None = None
    cancel: float | None = None
    cancel_after: float | None = None
    cancel_after_tokens: float | None = None
    disconnects: float | None = None
    storm: tuple[str, ...] = ()
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


def compared(options: Options) -> Options:
    """What ``compare`` takes where nothing else is given."""
    if options.trace is not None:
        return options
    requests = COMPARED_REQUESTS if options.requests is None else options.requests
    return replace(options, scenario=options.scenario or COMPARED, requests=requests)


def plan(options: Options) -> Plan:
    """Read the files and check everything.

    Raises ``FleetError`` that says what to change, and ``CliError`` for options without effect.
    """
    name, about = options.scenario or "custom", "as given on the command line"
    groups = GROUPS if options.groups is None else options.groups
    requests = REQUESTS if options.requests is None else options.requests
    fleet, workload = FleetConfig(groups=groups), Workload(requests=requests)
    if options.scenario:
        scenario = SCENARIOS[options.scenario]
        about = scenario.about
        fleet, workload = scenario.plan(groups, requests)
    fleet = replace(fleet, **_fleet(options, fleet))
    trace: list[Spec] | None = None
    if options.trace is not None:
        lines = _text(options.trace).splitlines()
        trace = read_trace(lines, options.trace.name, fleet.cost.max_model_len)
        workload = replace(workload, storms=_over(trace, workload))
        name, about = options.trace.name, "arrivals and cancels of a file"
        if options.scenario:
            name = f"{name} with {options.scenario}"
            about += ", with the storms, host loads, split and costs of the scenario"
    workload = replace(workload, **_workload(options, workload))
    refuse(options, _idle(options, workload))
    return Plan(name, about, fleet, workload, trace)


def _over(trace: list[Spec], workload: Workload) -> tuple[Storm, ...]:
    """A scenario's storms, at the same parts of the time in which requests arrive."""
    scale = trace[-1].arrival_s * workload.rate / workload.requests
    return tuple(Storm(storm.at_s * scale, storm.share) for storm in workload.storms)


def _idle(options: Options, workload: Workload) -> list[tuple[bool, Idle]]:
    """Which options nothing reads, and whether that is so in this workload."""
    calm, by_tokens = not workload.cancels.share, workload.cancels.after_tokens is not None
    return [
        (
            options.trace is not None,
            Idle(_IN_A_TRACE, "with --trace", "the file says who asks for what, and who cancels"),
        ),
        (
            workload.clients > 0,
            Idle(("rate",), "with --clients", "each asks again when it has its answer"),
        ),
        (
            not workload.clients,
            Idle(("think",), "without --clients", "arrivals wait for no answer"),
        ),
        (
            not workload.shared,
            Idle(("prefixes", "prefix_tokens"), "without --shared", "no prompts share a prefix"),
        ),
        (
            calm,
            Idle(
                ("cancel_after", "cancel_after_tokens"), "without --cancel", "nobody gives up alone"
            ),
        ),
        (
            by_tokens,
            Idle(("cancel_after",), "with --cancel-after-tokens", "that says when"),
        ),
        (
            calm and not workload.storms,
            Idle(("disconnects",), "without --cancel or --storm", "nobody gives up"),
        ),
    ]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _fleet(options: Options, base: FleetConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"cost": _cost(options, base.cost)}
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


def _cost(options: Options, base: CostModel) -> CostModel:
    """The scenario's, but for what a file says, but for what single fields say."""
    cost = base
    if options.cost is not None:
        cost = CostModel.loads(_text(options.cost), cost)
    return CostModel.from_json(dict(map(_field, options.cost_field)), cost)


def _workload(options: Options, base: Workload) -> dict[str, Any]:
    found = _given(
        rate=options.rate,
        clients=options.clients,
        think_s=options.think,
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
        after_s=options.cancel_after,
        after_tokens=options.cancel_after_tokens,
        disconnects=options.disconnects,
    )
    if cancels:
        found["cancels"] = replace(base.cancels, **cancels)
    if options.storm:
        storms = [_numbers("--storm", text, "AT:SHARE") for text in options.storm]
        found["storms"] = tuple(Storm(at, share) for at, share in storms)
    if options.priority:
        levels = [_numbers("--priority", text, "LEVEL:SHARE") for text in options.priority]
        found["priorities"] = tuple(
            (_whole("--priority", "LEVEL", level), share) for level, share in levels
        )
    deadlines = _given(
        queue=options.deadline_queue,
        first_token=options.deadline_first_token,
        total=options.deadline_total,
    )
    if deadlines:  # 0 is no bound, as for ``stopway up``
        bounds = {name: seconds or None for name, seconds in deadlines.items()}
        found["deadlines"] = replace(base.deadlines, **bounds)
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
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise FleetError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FleetError(f"{path} cannot be read: it is not UTF-8 text") from None
