"""The numbers that can be simulated: one check of each kind, for all that is read."""

from __future__ import annotations

import math
from typing import Any

from stopway_sim.fleet.errors import FleetError

SECONDS_MAX = 1e9  # some thirty years: no sum of such times is infinite
COUNT_MAX = 1 << 24  # of whatever is held in memory one by one
CHOICES_MAX = 64  # of one request; a gateway's own bound is a setting, 16 by default
PRIORITY_MAX = 100  # and -100 is the least, as gateways have it


def finite(what: str, value: Any) -> float:
    """``value`` as it is. Raises ``FleetError`` when it is NaN, infinite, or too large for it."""
    try:
        good = math.isfinite(value)
    except OverflowError:
        good = False
    if not good:
        raise FleetError(f"{what} is {_short(value)}; give a finite number")
    return float(value)


def is_duration(value: float) -> bool:
    """Whether ``value`` is a time that can be simulated, in seconds; NaN is none."""
    return 0 <= value <= SECONDS_MAX


def _short(value: Any) -> str:
    return f"{value}" if isinstance(value, float) else "an integer of hundreds of digits"
