"""What a simulation raises when the system under test did something wrong."""

from __future__ import annotations


class SimFailure(AssertionError):
    """A property does not hold in this world. The message says which; the seed replays it."""


def require(held: bool, message: str) -> None:
    """Raise ``SimFailure`` with ``message`` unless ``held``."""
    if not held:
        raise SimFailure(message)
