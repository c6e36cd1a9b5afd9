"""The exec thread: the only caller of the model and of torch.distributed, first in, first out."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stopway_core.types import StepResult, StepWork
from stopway_engine.outbox import Outbox


class Runner(Protocol):
    """What runs steps: ``stopway_engine.executor.Executor``."""

    def run(self, work: StepWork) -> StepResult | None:
        """Run one step. Returns the sampled tokens on the rank that samples."""


@dataclass(slots=True)
class Done:
    """A step was executed on this rank, by ``at`` (Unix seconds), in ``seconds``."""

    step: int
    at: float
    seconds: float
    result: StepResult | None


@dataclass(slots=True)
class Failed:
    """The thread has ended; the epoch must."""

    message: str


class ExecThread:
    """Builds a runner in its own thread, then runs steps; a file descriptor wakes the loop."""

    def __init__(self, build: Callable[[], Runner]) -> None:
        self._build = build
        self._work: queue.SimpleQueue[StepWork | None] = queue.SimpleQueue()
        self._done: Outbox[Done | Failed] = Outbox()
        self.ready = False
        self.started_at: float | None = None  # monotonic, of the step that runs now
        self._thread = threading.Thread(target=self._main, name="exec", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fileno(self) -> int:
        """Readable when ``take`` has something (or ``ready`` has become true)."""
        return self._done.fileno()

    def submit(self, work: StepWork) -> None:
        self._work.put(work)

    def take(self) -> list[Done | Failed]:
        """What has happened since the last call."""
        return self._done.take()

    def finish(self, timeout_s: float) -> None:
        """Run what is queued, then end; waits at most ``timeout_s``."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            runner = self._build()
            self.ready = True
            self._done.wake()
            while (work := self._work.get()) is not None:
                self.started_at = started = time.monotonic()
                result = runner.run(work)
                self.started_at = None
                seconds = time.monotonic() - started
                self._done.put(Done(work.step, time.time(), seconds, result))
        except BaseException as error:  # whatever it was, the control thread must hear of it
            traceback.print_exc()
            self._done.put(Failed(f"{type(error).__name__}: {error}"))
