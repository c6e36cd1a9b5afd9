"""What admins last said of each group's mode, for fronts that are new."""

from __future__ import annotations

from stopway_core.events import Mode


class AdminWords:
    """By group, and not by session: the address of a session goes with its pod.

    A front keeps the newest word, with when it was said, and tells it to every gateway. A front
    that is new knows none, or an older one from a gateway that missed something.
    """

    def __init__(self) -> None:
        self._words: dict[str, tuple[float, Mode]] = {}

    def hear(self, group: str, mode: Mode | None, said_at: float) -> tuple[Mode, float] | None:
        """Take what a front knows (``None``: nothing); what it is to be reminded of, if anything.

        ``said_at`` is in Unix seconds.
        """
        known = self._words.get(group)
        if mode is not None and (known is None or said_at >= known[0]):
            self._words[group] = said_at, mode
            return None
        if known is None or known[0] <= said_at:
            return None
        return known[1], known[0]
