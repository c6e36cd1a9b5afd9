"""What was done and what was seen, for the checks at the end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stopway_core.types import Reason

from .plan import Wanted

VIOLATIONS_MAX = 50
# What a group may refuse at any time: code -> status. Nothing was computed, and nothing is wrong.
REFUSALS = {"grammar_check_failed": 503, "attempt_expired": 503, "queue_full": 429}


@dataclass(frozen=True, slots=True)
class Life:
    """One process of one gateway: what it knew goes with it."""

    gateway: int
    pid: int


@dataclass(slots=True)
class Record:
    """One request as its client saw it; times in monotonic seconds."""

    wanted: Wanted
    name: str  # its x-request-id
    life: Life
    began: float
    ended: float = 0.0
    uid: str = ""
    status: int = 0
    ends: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False  # the answer was complete
    left: bool = False  # its client went away
    canceller: Life | None = None  # who accepted its cancel, at ``cancelled``
    cancelled: float = 0.0
    broken: str = ""  # the connection broke, or was refused

    @property
    def refused(self) -> bool:
        """Whether all that its client was told is one of the documented refusals."""
        code = None if self.error is None else self.error.get("code")
        return not self.ends and code in REFUSALS and REFUSALS[code] == self.status

    @property
    def how(self) -> str:
        """How it ended, in short."""
        if self.left:
            return "its client left"
        if self.broken:
            return "its connection broke"
        if self.error is not None:
            return f"{self.status} {self.error.get('code')}"
        ends = {stop_reason or finish for finish, stop_reason in self.ends.values()}
        return " and ".join(sorted(ends))

    def __str__(self) -> str:
        return f"{self.name} ({self.uid or 'no id yet'}, {self.wanted.then})"


@dataclass(frozen=True, slots=True)
class Issued:
    """A stop that a gateway accepted."""

    life: Life
    stop_id: str
    what: str


@dataclass(frozen=True, slots=True)
class Told:
    """A stop went out at ``at`` (monotonic) that may end requests for ``reason``."""

    at: float
    reason: Reason
    uids: tuple[str, ...] = ()
    conversation: str = ""
    tenant: str = ""
    everything: bool = False
    by: str = ""  # the tenant whose requests it reaches; empty: all


@dataclass(slots=True)
class Journal:
    """Everything that the checks need to know."""

    records: list[Record] = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    dead: set[Life] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    first_fault: float = 0.0
    recovered: float = 0.0  # both gateways served again

    def wrong(self, what: str) -> None:
        """Note that something is not as promised."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"at {time.monotonic() - self.began:.1f} s: {what}")

    def count(self, what: str) -> None:
        """Note that something happened, to show what a run covered."""
        self.counts[what] += 1

    def summary(self) -> str:
        """What the run covered, as text."""
        seen = self.counts + Counter(f"requests: {record.how}" for record in self.records)
        return "\n".join(f"{count:>6}  {what}" for what, count in sorted(seen.items()))
