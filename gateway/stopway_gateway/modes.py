"""What groups do with their requests, by an admin's word: pause, resume, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from stopway_core.events import Mode
from stopway_gateway.registry import Registry


class ModeService:
    """Tells groups their mode, and waits until their leaders say that it is so.

    The fronts remember it over the epochs of their groups, and ``AdminWords`` over their lives.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changed = asyncio.Event()

    def touch(self) -> None:
        """A leader came, went, or told its mode."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, mode: Mode, groups: Sequence[str], timeout_s: float) -> list[str]:
        """Tell ``groups``; at the end of the wait, what is still to come: empty when all is so.

        A group that connects again in the meantime is told again.
        """
        deadline = time.monotonic() + timeout_s
        told: dict[str, tuple[object, float]] = {}  # by group: its hello, the word before
        while True:
            pending = [text for group in groups if (text := self._tell(group, mode, told))]
            left = deadline - time.monotonic()
            if not pending or left <= 0:
                return pending
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _tell(self, group: str, mode: Mode, told: dict[str, tuple[object, float]]) -> str:
        """Tell a group once for each hello; what it is waited for, or an empty text.

        That it was in that mode before is no answer: to abort once more ends what has come since.
        """
        session = self._registry.of_group(group)
        if session is None or not session.connected:
            return f"{group}: it is not connected, and was not told"
        if group not in told or told[group][0] is not session.hello:
            told[group] = session.hello, session.said_at
            session.send_mode(mode)
        answered = session.answered_at > told[group][1]
        return "" if answered and session.mode is mode else f"{group}: its leader has not said so"

    def shown(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """The state of ``groups``, as their leaders last told it."""
        found = []
        for group in groups:
            session = self._registry.of_group(group)
            if session is None:
                continue
            load = session.load
            found.append(
                {
                    "group": group,
                    "mode": session.mode,
                    "epoch": session.epoch,
                    "running": load.get("running", 0),
                    "waiting": load.get("waiting", 0),
                    "blocks": {key: load.get(key, 0) for key in ("free", "held", "cached")},
                }
            )
        return found
