"""What a group does with its requests: as an admin wants it, and as its leader last said."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stopway_core.events import Mode

LONG_AGO = 1.0  # Unix seconds: any word whose age is known is newer


class GroupMode:
    """An admin's word outlives what it was said to.

    Each new leader is told before any request can reach it, so that a group that lost a rank is as
    paused as it was. This front may be new itself: gateways remember the word, and when it was
    said, and remind a front that knows none as new. Of several the newest counts, by the clock of
    the front that had it first.
    """

    def __init__(
        self,
        tell_leader: Callable[[dict[str, Any]], None],
        tell_gateways: Callable[[dict[str, Any]], None],
    ) -> None:
        self._tell_leader = tell_leader
        self._tell_gateways = tell_gateways
        self._in_force = Mode.RUNNING
        self._wanted: Mode | None = None
        self._said_at = 0.0  # Unix seconds; 0: nobody has said anything

    def fields(self) -> dict[str, Any]:
        """What gateways are told of it, in a hello and whenever it changes."""
        return {"mode": self._in_force, "wanted": self._wanted, "said_at": self._said_at}

    def say(self, mode: Mode, said_at: float | None = None) -> None:
        """An admin's word, or (with ``said_at``) a gateway's reminder of an earlier one."""
        fresh = said_at is None
        if said_at is None:
            # After all others, also those of a front whose clock was ahead.
            said_at = max(time.time(), self._said_at + 1e-3)
        elif said_at <= self._said_at:
            return
        # A leader that is told to abort once more would end what has come since.
        is_news = fresh or mode is not self._wanted
        self._wanted, self._said_at = mode, said_at
        self._tell()
        if is_news:
            self._tell_leader({"mode": mode})

    def leader_came(self, mode: Mode) -> None:
        """A leader is there, in ``mode``, and has not been sent anything; a hello is to follow."""
        if self._wanted is None:
            # This front is younger than its leader. That somebody paused it is a word; that it
            # runs may be for want of a reminder.
            self._wanted = mode
            self._said_at = 0.0 if mode is Mode.RUNNING else LONG_AGO
        else:
            self._tell_leader({"mode": self._wanted})
        if self._in_force is not self._wanted:
            self._in_force = mode  # else it stays so: what it says was said before it was told

    def leader_says(self, mode: Mode) -> None:
        """The leader's answer to a word: this is in force. Each is passed on: who asked waits."""
        self._in_force = mode
        self._tell()

    def _tell(self) -> None:
        self._tell_gateways({"type": "mode", **self.fields()})
