"""Ending background tasks so that they really end."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.5


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks`` and wait for them.

    A library that times out just when it is cancelled may turn the cancel into its own error, and
    the loop around it would then go on: so the cancel is repeated until the task is done.
    """
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
