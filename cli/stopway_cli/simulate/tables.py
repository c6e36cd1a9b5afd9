"""Reports on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from stopway_cli import render
from stopway_cli.simulate.figures import best_of, shown_in
from stopway_sim.fleet import Report

PADDING = 4  # of a column, left and right of it


def one(report: Report, name: str, about: str) -> None:
    """One run of what ``about`` says: a figure a line, then why requests ended."""
    document = report.to_json()
    table = _table(
        f"{name}: {about}\n{report.policy}: {report.requests:,} requests on {report.groups} groups "
        f"in {report.makespan_s:,.1f} simulated seconds"
    )
    table.add_column("", justify="right", no_wrap=True)
    for shown in shown_in([document]):
        table.add_row(shown.title, shown.text(document))
    for reason, count in document["reasons"].items():
        table.add_row(f"ended: {reason}", f"{count:,}")
    render.console().print(table)


def many(document: dict[str, Any]) -> None:
    """A column a policy, in as many tables as the width asks for; the best of a line is green."""
    runs = document["runs"]
    first = runs[0]
    title = (
        f"{document['scenario']}: {document['about']}\n{first['requests']:,} requests, "
        f"{first['groups']} groups, seed {first['seed']}, simulated"
    )
    rows = shown_in(runs)
    best = [best_of(shown, runs) for shown in rows]
    widths = [
        max(len(run["policy"]), *(len(shown.text(run)) for shown in rows)) + PADDING for run in runs
    ]
    console = render.console()
    room = console.width - max(len(shown.title) for shown in rows) - PADDING
    for columns in parts(widths, room):
        table = _table("" if columns.start else title)
        for index in columns:
            table.add_column(runs[index]["policy"], justify="right", no_wrap=True)
        for shown, good in zip(rows, best, strict=True):
            texts = {index: shown.text(runs[index]) for index in columns}
            cells = (f"[green]{text}[/green]" if i in good else text for i, text in texts.items())
            table.add_row(shown.title, *cells)
        if columns.start:
            console.print()
        console.print(table)


def parts(widths: Sequence[int], room: int) -> list[range]:
    """Columns in the least number of tables, about equally many each, that are at most ``room``.

    Tables of one column where even these are wider.
    """
    count = len(widths)
    for tables in range(1, count + 1):
        size = -(-count // tables)
        found = [range(i, min(count, i + size)) for i in range(0, count, size)]
        if all(sum(widths[part.start : part.stop]) <= room for part in found):
            break
    return found


def _table(title: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, PADDING // 2))
    table.add_column("figure", overflow="fold")
    return table
