"""A workload from a CSV: what was asked when, and when it was given up."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator

from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import CHOICES_MAX, COUNT_MAX, PRIORITY_MAX, is_duration
from stopway_sim.fleet.workload import Spec

REQUIRED = ("arrival", "prompt", "output")
OPTIONAL = ("cancel", "priority", "choices")


def read_trace(lines: Iterable[str], name: str, limit: int) -> list[Spec]:
    """The requests of a CSV with a header, by arrival.

    Columns: ``arrival`` (s), ``prompt`` and ``output`` (tokens), and optionally ``cancel`` (s, the
    clock of ``arrival``; empty: never): the client calls cancel then; ``priority`` (empty: 0; a
    smaller one goes first); and ``choices`` (empty: 1), each of ``output`` tokens. ``limit`` is the
    model's context.

    Raises ``FleetError`` that names the line (the header is line 1) and the column.
    """
    rows = _rows(lines, name)
    _, header = next(rows, (1, []))
    columns = [column.strip().lower() for column in header]
    _check_header(name, columns)
    specs: list[Spec] = []
    for line, row in rows:
        if not row or not any(cell.strip() for cell in row):
            continue
        where = f"{name}, line {line}"
        if len(row) != len(columns):
            raise FleetError(f"{where}: {len(row)} cells under {len(columns)} columns")
        cells = {column: cell.strip() for column, cell in zip(columns, row, strict=True)}
        specs.append(_spec(where, cells, len(specs), limit))
    if not specs:
        raise FleetError(f"{name}: no requests below the header")
    return sorted(specs, key=lambda spec: (spec.arrival_s, spec.number))


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row."""
    reader = csv.reader(lines)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise FleetError(f"{name}, line {reader.line_num}: {error}") from None


def _check_header(name: str, columns: list[str]) -> None:
    wrong = [
        *(f"column {c!r} is unknown" for c in columns if c not in REQUIRED + OPTIONAL),
        *(f"no column {c!r}" for c in REQUIRED if c not in columns),
        *(f"column {c!r} is there twice" for i, c in enumerate(columns) if c in columns[:i]),
    ]
    if wrong:
        raise FleetError(
            f"{name}, line 1: {wrong[0]}; the header is {','.join(REQUIRED)} and, where there are "
            f"any, {','.join(OPTIONAL)}, in any order"
        )


def _spec(where: str, cells: dict[str, str], number: int, limit: int) -> Spec:
    arrival = _seconds(where, "arrival", cells["arrival"])
    prompt = _tokens(where, "prompt", cells["prompt"])
    output = _tokens(where, "output", cells["output"])
    if prompt + output > limit:
        raise FleetError(
            f"{where}, column 'output': {prompt} + {output} tokens exceed the context of {limit}"
        )
    after: float | None = None
    if cells.get("cancel"):
        cancel = _seconds(where, "cancel", cells["cancel"])
        if cancel < arrival:
            raise FleetError(f"{where}, column 'cancel': {cancel:g} s is before its arrival")
        after = cancel - arrival
    return Spec(
        number,
        arrival,
        own=prompt,
        output=output,
        cancel_after_s=after,
        priority=_priority(where, cells.get("priority", "")),
        choices=_choices(where, cells.get("choices", "")),
    )


def _seconds(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_duration(value):
        raise FleetError(f"{where}, column {column!r}: {text!r} is no time; give seconds from 0")
    return value


def _tokens(where: str, column: str, text: str) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(COUNT_MAX))
    if not digits or int(text) < 1:
        raise FleetError(
            f"{where}, column {column!r}: {text!r} is no count; give a whole number from 1"
        )
    return int(text)


def _priority(where: str, text: str) -> int:
    digits = text.removeprefix("-")
    good = digits.isascii() and digits.isdigit() and len(digits) <= len(str(PRIORITY_MAX))
    if text and not (good and int(digits) <= PRIORITY_MAX):
        raise FleetError(
            f"{where}, column 'priority': {text!r} is none; give a whole number from "
            f"-{PRIORITY_MAX} to {PRIORITY_MAX}"
        )
    return int(text) if text else 0


def _choices(where: str, text: str) -> int:
    choices = _tokens(where, "choices", text) if text else 1
    if choices > CHOICES_MAX:
        raise FleetError(f"{where}, column 'choices': {choices}; give 1 to {CHOICES_MAX}")
    return choices
