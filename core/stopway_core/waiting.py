"""The waiting queue: by priority, and in each priority those that had started before the others.

Every operation is O(priorities in use), which are few; leaving from the middle costs the same.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from stopway_core.requests import Choice

_Line = OrderedDict[int, Choice]  # by arrival


class WaitingQueue:
    """Choices that are ready to be admitted. Smaller priorities go first."""

    def __init__(self) -> None:
        # Three lines each: those at the front (preempted, or siblings of one that runs), newest
        # first; the others, oldest first; and of these, those that had started, too (preempted,
        # where the policy sends them to the tail).
        self._lines: dict[int, tuple[_Line, _Line, _Line]] = {}
        self._priorities: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, choice: Choice) -> None:
        """Queue behind all others of its priority."""
        lines = self._line(choice.priority)
        lines[1][choice.arrival] = choice
        if choice.preemptions:
            lines[2][choice.arrival] = choice
        self._size += 1

    def push_front(self, choice: Choice) -> None:
        """Queue before all others of its priority: it has started."""
        line = self._line(choice.priority)[0]
        line[choice.arrival] = choice
        line.move_to_end(choice.arrival, last=False)
        self._size += 1

    def remove(self, choice: Choice) -> bool:
        """Take a choice out, wherever it stands; False when it is not here."""
        lines = self._lines.get(choice.priority)
        if lines is None:
            return False
        arrival = choice.arrival
        if lines[0].pop(arrival, None) is None and lines[1].pop(arrival, None) is None:
            return False
        lines[2].pop(arrival, None)
        self._size -= 1
        if not lines[0] and not lines[1]:
            del self._lines[choice.priority]
            self._priorities.remove(choice.priority)
        return True

    def replace(self, choice: Choice, heir: Choice) -> bool:
        """Give the place of a choice to another of its request; False when it is not here."""
        found = False
        for line in self._lines.get(choice.priority, ()):
            if choice.arrival in line:
                line[choice.arrival] = heir
                found = True
        if found:
            heir.arrival = choice.arrival
        return found

    def head(self, *, started: bool = False) -> Choice | None:
        """Who is next; with ``started`` only among those that had started."""
        for priority in self._priorities:
            front, others, started_there = self._lines[priority]
            for line in (front, started_there if started else others):
                if line:
                    return next(iter(line.values()))
        return None

    def _line(self, priority: int) -> tuple[_Line, _Line, _Line]:
        lines = self._lines.get(priority)
        if lines is None:
            lines = self._lines[priority] = (OrderedDict(), OrderedDict(), OrderedDict())
            insort(self._priorities, priority)
        return lines
