"""``stopway bench``: every case on every server in turn, then figures and ratios."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table

from stopway_cli import render
from stopway_cli.bench import calibration, figures, server
from stopway_cli.errors import CliError, Exit
from stopway_cli.idle import Idle, refuse
from stopway_core.topology import EngineSettings
from stopway_sim.fleet import Figure

Figures = dict[str, Any]
Case = Callable[[server.Subject], Awaitable[Figures]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for on the command line, each called as its option."""

    urls: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    model: str = ""
    local: bool = False
    tensor: int = 1
    pipeline: int = 1
    turns: bool = False
    quick: bool = False
    json: bool = False


def check(plan: Plan) -> None:
    """Raises ``CliError`` for what cannot be measured, before anything is."""
    for url in plan.urls:
        if not _is_url(url):
            raise CliError(f"{url!r} is no URL; write http://HOST:PORT", Exit.USAGE)
    if not (plan.urls or plan.local or plan.turns):
        raise CliError("name a server's URL, or use --local to start a stack", Exit.USAGE)
    shape = Idle(("tensor", "pipeline"), "without --local", "a server that runs has its shape")
    theirs = Idle(("key", "model"), "without a URL", "the local stack has its own")
    repeats = Idle(("quick",), "without a server", "only the core's turns are measured")
    refuse(
        plan,
        [
            (not plan.local, shape),
            (not plan.urls, theirs),
            (not plan.urls and not plan.local, repeats),
        ],
    )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets, or of a port
        return False


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def key_for(keys: tuple[str, ...], index: int, count: int) -> str:
    """The key of one of ``count`` servers: the only one, or its own. Raises ``CliError``."""
    if not keys:
        return os.environ.get("STOPWAY_KEY", "")
    if len(keys) == 1:
        return keys[0]
    if len(keys) != count:
        raise CliError(
            f"{len(keys)} keys for {count} servers; give --key once, or once for each URL in order",
            Exit.CONFIG,
        )
    return keys[index]


def cases(subject: server.Subject, quick: bool) -> dict[str, Case]:
    """Name -> case, in the order they are run. Seeds differ, so that no cache helps."""
    seed = int(time.time()) % 100_000 * 1000
    few, more = (2, 3) if quick else (5, 8)

    def load(streams: int, tokens: int) -> Case:
        return lambda s: server.throughput(s, streams, tokens, seed + streams * 100)

    chosen: dict[str, Case] = {
        f"streams_{streams}": load(streams, tokens) for streams, tokens in server.LOADS
    }
    chosen["disconnect_decoding"] = lambda s: server.disconnect(s, more, seed + 10_000)
    chosen["disconnect_prefill"] = lambda s: server.prefill(s, few, seed + 20_000)
    if subject.kind == "stopway":
        chosen["cancel"] = lambda s: server.cancel(s, more, seed + 30_000)
    return chosen


async def measure(subjects: list[server.Subject], quick: bool) -> list[Figures]:
    """All figures of all servers; case by case, so that a noisy minute hits all alike."""
    found: list[Figures] = [{} for _ in subjects]
    plans = [cases(subject, quick) for subject in subjects]
    names = list(dict.fromkeys(name for plan in plans for name in plan))
    for name in names:
        for subject, plan, result in zip(subjects, plans, found, strict=True):
            if name not in plan:
                continue
            say(f"{name}: {subject.url}")
            try:
                result[name] = await plan[name](subject)
            except CliError as error:
                say(f"  left out: {error.message}")
    return found


async def run(plan: Plan) -> Exit:
    """Measure and print. Raises ``CliError`` as ``check`` does, and when a server is not there."""
    check(plan)
    subjects = [
        server.Subject(url.rstrip("/"), key_for(plan.key, i, len(plan.urls)), plan.model)
        for i, url in enumerate(plan.urls)
    ]
    turns: Figures | None = None
    if plan.turns:
        from stopway_cli.bench.turns import measure as measure_turns

        say("the core's turn cost: 256 running, 10,000 waiting")
        turns = measure_turns()
        if not plan.json:
            print_turns(turns)
    if not subjects and not plan.local:
        if plan.json:
            print(json.dumps({"turns": turns}))
        return Exit.OK
    async with AsyncExitStack() as opened:
        if plan.local:
            subjects.insert(0, await _local(plan, opened))
        for subject in subjects:
            await server.examine(subject)
        found = await measure(subjects, plan.quick)
        beside = await _simulated(subjects[0], plan) if plan.local else None
    document = to_json(subjects, found, turns, beside)
    if plan.json:
        print(json.dumps(document))
    else:
        print_servers(document)
        if beside is not None:
            print_beside(beside.figures)
    return Exit.OK


async def _simulated(subject: server.Subject, plan: Plan) -> calibration.Simulated | None:
    """The local stack beside its simulation."""
    say("the simulation, calibrated with this stack's steps")
    seed = int(time.time()) % 100_000 * 1000 + 40_000
    try:
        return await calibration.measure(subject, seed, plan.tensor, plan.pipeline)
    except CliError as error:
        say(f"  left out: {error.message}")
        return None


async def _local(plan: Plan, opened: AsyncExitStack) -> server.Subject:
    from stopway_cli.stack import LocalStack, StackConfig
    from stopway_cli.up import ProgressLine

    settings = replace(EngineSettings(), drain_s=1.0)
    config = StackConfig(tensor=plan.tensor, pipeline=plan.pipeline, port=0, settings=settings)
    progress = ProgressLine()
    opened.callback(progress.close)
    stack = await opened.enter_async_context(LocalStack(config, progress))
    progress.close()
    return server.Subject(stack.url, stack.key)


def to_json(
    subjects: list[server.Subject],
    found: list[Figures],
    turns: Figures | None,
    beside: calibration.Simulated | None = None,
) -> Figures:
    """The one document of ``--json``."""
    simulated = None
    if beside is not None:
        simulated = {name: [f.to_json() for f in row] for name, row in beside.figures.items()}
    ratios = figures.ratios(found)
    servers = [
        {
            "url": subject.url,
            "kind": subject.kind or "unknown",
            "model": subject.model,
            "figures": own,
            "ratios": relative,
        }
        for subject, own, relative in zip(subjects, found, ratios, strict=True)
    ]
    cost = None if beside is None else beside.cost.to_json()
    return {"turns": turns, "servers": servers, "simulated": simulated, "cost": cost}


def print_turns(turns: Figures) -> None:
    """The core's cost as a table."""
    table = Table(
        title=f"turn cost, {turns['running']} running, {turns['waiting']:,} waiting",
        title_justify="left",
        box=None,
        padding=(0, 2),
    )
    for title in ("turn", "where", "p50", "p99", "max"):
        table.add_column(title, justify="left" if title in ("turn", "where") else "right")
    for name in ("decode", "stop_and_submit"):
        for where in ("planner_ms", "follower_ms"):
            row = turns[name][where]
            values = (f"{row[key]:.3f} ms" for key in ("p50", "p99", "max"))
            table.add_row(name.replace("_", " "), where.removesuffix("_ms"), *values)
    render.console().print(table)


def print_beside(beside: dict[str, list[Figure]]) -> None:
    """The simulation's figures beside the engine's, with the error."""
    table = Table(box=None, padding=(0, 2))
    for title in ("workload", "figure"):
        table.add_column(title, no_wrap=True)
    for title in ("measured", "simulated", "error"):
        table.add_column(title, justify="right")
    for workload, found in beside.items():
        for figure in found:
            error = "-" if figure.error is None else f"{figure.error:+.0%}"
            values = (f"{figure.measured:,.1f}", f"{figure.simulated:,.1f}", error)
            table.add_row(workload, figure.name.replace("_", " "), *values)
    render.console().print(table)


def print_servers(document: Figures) -> None:
    """A row per figure, a column per server, ratios to the first in brackets."""
    servers = document["servers"]
    table = Table(box=None, padding=(0, 2))
    table.add_column("figure", no_wrap=True)
    for each in servers:
        table.add_column(f"{each['kind']}\n{each['url']}", justify="right", no_wrap=True)
    own = [figures.leaves(each["figures"]) for each in servers]
    for path in dict.fromkeys(path for leaves in own for path in leaves):
        if path[-1] in ("n", "p99"):  # of a few repetitions: the maximum says it
            continue
        cells = []
        for index, leaves in enumerate(own):
            relative = servers[index]["ratios"].get(".".join(path))
            shown = "-" if path not in leaves else f"{leaves[path]:,.1f}"
            cells.append(f"{shown} (x{relative:.2f})" if index and relative else shown)
        table.add_row(" ".join(path).replace("_", " "), *cells)
    render.console().print(table)
