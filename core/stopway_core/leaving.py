"""When rows of ended requests leave the step that runs: for the engine and for its simulation."""

from __future__ import annotations

PAYS = 4
"""Rows leave when at least one in this many of the step is dead: making the batch anew takes about
as long as a layer needs for a few rows."""

SHARED_ROWS_MIN = 33
"""Rows of a step from which on the ranks of a stage tell each other. Below that, a step is a matter
of tens of milliseconds, and one row more would be a larger part of its sums."""


def pays(dead: int, rows: int) -> bool:
    """Whether ``dead`` of a step's ``rows`` are worth leaving; each token that is fed is a row."""
    return dead > 0 and dead * PAYS >= rows
