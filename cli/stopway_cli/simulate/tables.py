"""Reports on a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from stopway_cli import render
from stopway_cli.simulate.figures import best_of, shown_in
from stopway_sim.fleet import Report


def one(report: Report) -> None:
    """One run: a figure a line, then why requests ended."""
    document = report.to_json()
    table = _table(
        f"{report.policy}: {report.requests:,} requests on {report.groups} groups in "
        f"{report.makespan_s:,.1f} simulated seconds"
    )
    table.add_column("", justify="right", no_wrap=True)
    for shown in shown_in([document]):
        table.add_row(shown.title, shown.text(document))
    for reason, count in document["reasons"].items():
        table.add_row(f"ended: {reason}", f"{count:,}")
    render.console().print(table)


def many(document: dict[str, Any]) -> None:
    """A column a policy; the best of a line is green."""
    runs = document["runs"]
    first = runs[0]
    table = _table(
        f"{document['scenario']}: {document['about']}\n{first['requests']:,} requests, "
        f"{first['groups']} groups, seed {first['seed']}, simulated"
    )
    for run in runs:
        table.add_column(run["policy"], justify="right", no_wrap=True)
    for shown in shown_in(runs):
        best = best_of(shown, runs)
        cells = [
            f"[green]{shown.text(run)}[/green]" if index in best else shown.text(run)
            for index, run in enumerate(runs)
        ]
        table.add_row(shown.title, *cells)
    render.console().print(table)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    table.add_column("figure", no_wrap=True)
    return table
