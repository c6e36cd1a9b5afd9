"""``stopway up``: the local stack in the foreground, until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

from rich.status import Status

from stopway_cli import render
from stopway_cli.errors import Exit
from stopway_cli.stack import LocalStack, Progress, StackConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProgressLine:
    """Progress on stderr: one living line on a terminal, else a line for every change."""

    def __init__(self) -> None:
        console = render.console(stderr=True)
        self._status = Status("starting", console=console) if console.is_terminal else None
        self._last = ""
        if self._status is not None:
            self._status.start()

    def __call__(self, now: Progress) -> None:
        if self._status is not None:
            self._status.update(f"{now} [dim]{now.elapsed_s:.0f} s[/]")
        elif str(now) != self._last:
            self._last = str(now)
            print(self._last, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the living line away."""
        if self._status is not None:
            self._status.stop()


async def until_interrupted(
    stack: LocalStack, work: Callable[[], Awaitable[Exit]], interrupted: Callable[[], Exit]
) -> Exit:
    """Run ``work``, which enters and leaves ``stack``, to its end or to a signal.

    After a signal the answer is ``interrupted()``; a second one ends the stack at once.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            stack.hurry()
            return
        task.cancel()
        if sys.stderr.isatty():
            print("stopping; once more to stop without draining", file=sys.stderr, flush=True)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if not signals:
            raise
        return interrupted()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def serve(config: StackConfig) -> Exit:
    """Start the stack, say where it is, and keep it running."""
    progress = ProgressLine()
    stack = LocalStack(config, progress)
    end = Exit.INTERRUPTED

    async def work() -> Exit:
        nonlocal end
        async with stack:
            end = Exit.OK  # it served; being told to stop is how it ends
            progress.close()
            announce(stack)
            await stack.wait()
        return end

    try:
        return await until_interrupted(stack, work, lambda: end)
    finally:
        progress.close()


def announce(stack: LocalStack) -> None:
    """The one line that says it is ready; with the key if the user did not bring one."""
    key = "" if stack.config.api_keys else f"  key {stack.key}"
    print(f"ready: {stack.url}{key}", flush=True)
