"""What worlds met, as text: transitions, places by causes, and what was never met."""

from __future__ import annotations

from collections import Counter

from stopway_core.lifecycle import TRANSITIONS
from stopway_sim.places import POSSIBLE, Cause, Place

COLUMNS = 5  # of a table; more causes make more tables
CELL = max(map(len, Cause)) + 2


def met(coverage: Counter[str], place: Place, cause: Cause) -> int:
    """How often a cause found a request in a place."""
    return coverage[f"{place} x {cause}"]


def never_met(coverage: Counter[str]) -> list[str]:
    """The combinations and transitions that can be met, and were not."""
    missing = [
        f"{place} x {cause}"
        for cause, places in POSSIBLE.items()
        for place in places
        if not met(coverage, place, cause)
    ]
    return missing + [name for name in _transitions() if not coverage[name]]


def report(coverage: Counter[str]) -> str:
    """All of it, in lines."""
    rows = ["transitions taken"]
    rows += [f"  {name:<40}{coverage[name]:>9}" for name in _transitions()]
    width = max(map(len, Place)) + 2
    rows += ["", "where a request was, by what ended it ('.': never; '-': cannot be)"]
    # What a policy alone can do has a column when it was met.
    shown = [c for c in Cause if POSSIBLE[c] or any(met(coverage, place, c) for place in Place)]
    for at in range(0, len(shown), COLUMNS):
        causes = shown[at : at + COLUMNS]
        rows.append(" " * width + "".join(f"{cause:>{CELL}}" for cause in causes))
        for place in Place:
            rows.append(f"{place:<{width}}" + "".join(_cell(coverage, place, c) for c in causes))
        rows.append("")
    known = set(_transitions()) | {f"{place} x {cause}" for place in Place for cause in Cause}
    rows += [f"  {name:<40}{count:>9}" for name, count in sorted(coverage.items())
             if name not in known]  # fmt: skip
    missing = never_met(coverage)
    rows += ["", f"never met: {', '.join(missing) if missing else 'none'}"]
    return "\n".join(rows)


def _cell(coverage: Counter[str], place: Place, cause: Cause) -> str:
    count = met(coverage, place, cause)
    return f"{count or ('.' if place in POSSIBLE[cause] else '-'):>{CELL}}"


def _transitions() -> list[str]:
    return [f"{state} --{event}-->" for state, event in TRANSITIONS]
