"""The leader's last two waits: its followers leave, then its front has read all that it said."""

from __future__ import annotations

from stopway_engine.link import Link

GOODBYE_S = 2.0


class Goodbye:
    """Each wait takes at most ``GOODBYE_S``: who is frozen or gone keeps no leader.

    The front must have read everything, for ``supervise`` ends it as soon as the ranks have gone,
    and what a socket still holds then is lost. It closes its end when it has.
    """

    def __init__(self, mono: float) -> None:
        self.until = mono + GOODBYE_S
        self._parting = False  # from the front

    def over(self, mono: float, followers: list[Link], front: Link | None) -> bool:
        """Whether nobody is to be waited for any more."""
        if not self._parting:
            if followers and mono < self.until:
                return False
            self._parting = True
            self.until = mono + GOODBYE_S
            if front is not None:
                front.finish()
        return front is None or mono >= self.until
