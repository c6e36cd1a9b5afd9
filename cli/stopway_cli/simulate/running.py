"""Runs what was asked and prints it: progress on stderr, the report on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stopway_cli import render
from stopway_cli.errors import CliError, Exit
from stopway_cli.simulate import options as given
from stopway_cli.simulate import page, tables
from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_sim.fleet import FleetError, Report, simulate
from stopway_sim.fleet.run import check_input


@contextmanager
def _input() -> Iterator[None]:
    """What cannot be simulated is the user's to change."""
    try:
        yield
    except FleetError as error:
        raise CliError(str(error), Exit.CONFIG) from None


async def sim(
    options: given.Options, policy: str, seed: int, processes: int, as_json: bool
) -> Exit:
    """One policy, by name. Raises ``CliError`` for an input that cannot be simulated."""
    with _input():
        plan = _plan(options, seed)
        [report] = _run(plan, [POLICIES[policy]], seed, processes)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        tables.one(report, plan.name, plan.about)
    return Exit.OK


async def compare(
    options: given.Options,
    policies: tuple[str, ...],
    seed: int,
    processes: int,
    as_json: bool,
    html: Path | None,
) -> Exit:
    """Several policies on one workload. Raises ``CliError`` as ``sim`` does."""
    with _input():
        plan = _plan(given.compared(options), seed)
        chosen = [POLICIES[name] for name in dict.fromkeys(policies or POLICIES)]
        if html is not None:
            _write(html, "", "a")  # before minutes of work, and what it has stays until then
        reports = _run(plan, chosen, seed, processes)
    document = to_json(plan, reports)
    if html is not None:
        _write(html, page.render(document, [report.cdfs() for report in reports]))
    if as_json:
        print(json.dumps(document))
    else:
        tables.many(document)
    return Exit.OK


def to_json(plan: given.Plan, reports: list[Report]) -> dict[str, Any]:
    """The one document of ``compare --json``."""
    return {
        "scenario": plan.name,
        "about": plan.about,
        "cost": plan.fleet.cost.to_json(),
        "runs": [report.to_json() for report in reports],
    }


def _plan(options: given.Options, seed: int) -> given.Plan:
    """All that is checked before anything is simulated, or shown of it."""
    plan = given.plan(options)
    check_input(plan.fleet, plan.workload, seed, plan.trace)
    return plan


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}", Exit.CONFIG) from None


def _run(plan: given.Plan, policies: list[Policy], seed: int, processes: int) -> list[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    reports: list[Report] = []
    with Progress(*columns, console=render.console(stderr=True)) as bar:
        for policy in policies:
            task = bar.add_task(policy.name, total=None)

            def progress(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            reports.append(
                simulate(
                    replace(plan.fleet, policy=policy),
                    plan.workload,
                    seed,
                    trace=plan.trace,
                    processes=processes,
                    progress=progress,
                )
            )
    return reports
