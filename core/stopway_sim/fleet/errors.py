"""What a user of the simulation can get wrong."""

from __future__ import annotations


class FleetError(ValueError):
    """An input that cannot be simulated; the message says where it is and what it should be."""
