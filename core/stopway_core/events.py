"""What reaches a planner, and what leaves it for the front: plain values.

A ``key`` numbers one choice of one request for the life of the epoch; it is what travels between
the leader and its front instead of the uid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stopway_core.types import Logprobs, Outcome, Reason, StepResult, Stop, Submission


class Mode(StrEnum):
    """What a group does with its requests; an admin changes it."""

    RUNNING = "running"
    WAITING = "wait"  # those in the replicas run to their end, the queue stands still
    FROZEN = "keep"  # nothing is launched; all keep what they hold
    ABORTED = "abort"  # all were ended when this began; the queue stands still
    DRAINING = "drain"  # all run to their end, nothing new is taken


# --- in ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    submission: Submission


@dataclass(frozen=True, slots=True)
class StopSignal:
    stop: Stop


@dataclass(frozen=True, slots=True)
class Completed:
    """A step's result: proof that every rank has done its on-queue writes of that step."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Hit:
    """The front found a stop string: ``keep`` output tokens stand before or in it."""

    key: int
    keep: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The session of a gateway broke: what it asked for has nobody to go to."""

    gateway: str


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The group is to go: nothing new is accepted, what still runs at ``until`` is stopped."""

    until: float


@dataclass(frozen=True, slots=True)
class Compiled:
    """The sampling rank has compiled the grammar of a slot, or says why it cannot."""

    slot: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ModeChanged:
    """An admin pauses the group, or resumes it."""

    mode: Mode


Event = Submit | StopSignal | Completed | Hit | LeaseLost | DrainStarted | Compiled | ModeChanged

# --- out -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    """Queued under ``keys``, one a choice."""

    uid: str
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Never queued; nothing was computed. ``status`` is HTTP's."""

    uid: str
    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The one outcome of one choice. ``keep`` output tokens are delivered, the rest is not."""

    key: int
    uid: str
    index: int
    outcome: Outcome
    reason: Reason
    prompt_tokens: int
    keep: int
    cached_tokens: int
    discarded_tokens: int
    preemptions: int
    drafted_tokens: int  # proposed and verified, of steps that had completed by then
    accepted_tokens: int  # of them, those that were right
    queued_at: float
    ready_at: float  # when its grammar was compiled; as queued when it has none
    admitted_at: float
    first_token_at: float
    ended_at: float
    traceparent: str
    message: str = ""


@dataclass(slots=True)
class Outputs:
    """What one turn has for the front. ``keys``, ``tokens`` and ``logprobs`` are parallel."""

    accepted: list[Accepted] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.accepted or self.refused or self.keys or self.ended)
