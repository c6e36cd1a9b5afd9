"""``stopway sim`` and ``stopway compare``: a fleet in simulated time, as tables, JSON and HTML."""

from stopway_cli.simulate.commands import register

__all__ = ["register"]
