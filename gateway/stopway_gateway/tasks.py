"""Ending background tasks so that they really end."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.5


def check_cancelled() -> None:
    """Raise the cancel of this task that a library swallowed, if one did.

    Up to Python 3.11, ``asyncio.wait_for`` returns its result and forgets a cancel that comes just
    when it is there; redis-py sends every command through it. A loop of commands that is cancelled
    once, or that an ``asyncio.timeout`` is to end, then goes on for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks`` and wait for them.

    A library may swallow a cancel, or turn it into an error of its own, and the loop around it
    would then go on: so the cancel is repeated until the task is done.
    """
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
