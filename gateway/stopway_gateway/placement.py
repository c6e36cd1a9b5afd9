"""Which group takes a request: the one that has its conversation, else the least busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from stopway_core.events import Mode
from stopway_gateway.session import LeaderSession

_CONVERSATIONS_MAX = 10_000


def takes(session: LeaderSession) -> bool:
    """Whether a group that is ready takes requests: not while it drains, for an admin."""
    return Mode.DRAINING not in (session.mode, session.wanted)


def serves(session: LeaderSession) -> bool:
    """Whether what it takes is computed: not while it is paused, or is just being told so."""
    return session.mode is Mode.RUNNING and session.wanted is Mode.RUNNING


class Placement:
    """Remembers where conversations went, the latest ``_CONVERSATIONS_MAX`` of them."""

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def choose(
        self, ready: Sequence[LeaderSession], tenant: str, conversation: str
    ) -> LeaderSession | None:
        """One of ``ready``, or None when none takes requests.

        A paused group is chosen only when no other one serves: what it takes waits there. One that
        drains is never chosen. A conversation's cache is worth more than an even load, so affinity
        comes first; a home that does not serve is replaced by the choice made instead.
        """
        taking = [session for session in ready if takes(session)]
        serving = [session for session in taking if serves(session)] or taking
        if not serving:
            return None
        home = self._homes.get((tenant, conversation)) if conversation else None
        chosen = next((session for session in serving if session.group == home), None)
        if chosen is None:
            chosen = min(serving, key=lambda session: (session.outstanding, session.group))
        if conversation:
            self._homes[tenant, conversation] = chosen.group
            self._homes.move_to_end((tenant, conversation))
            if len(self._homes) > _CONVERSATIONS_MAX:
                self._homes.popitem(last=False)
        return chosen
