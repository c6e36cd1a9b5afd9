"""What a thread has for the control loop: items in order, and a file descriptor that wakes it."""

from __future__ import annotations

import os
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Filled by one thread, emptied by another that selects on ``fileno``."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable once something was put or ``wake`` was called, until ``take``."""
        return self._wake

    def put(self, item: T) -> None:
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Have the other thread look, though no item is there for it."""
        os.eventfd_write(self._wake, 1)

    def take(self) -> list[T]:
        """What was put since the last call."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken
