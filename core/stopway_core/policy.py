"""What a policy may choose. A policy decides, the ledger moves.

A strategy exists only where policies differ; each policy is one frozen value in ``policies/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that could be preempted, in the numbers that a choice needs."""

    rid: int
    arrival: int  # order of arrival; smaller is older
    output_len: int  # tokens generated
    prompt_len: int
    recompute: int  # tokens whose KV would have to be computed again
    frees: int  # blocks that nobody else holds
    priority: int = 0  # smaller goes first


Victim = Callable[[Sequence[Candidate], int], Candidate | None]
"""(candidates, blocks short) -> whom to preempt, or None when nobody's going would help."""


class Detection(StrEnum):
    """How the front end learns that a client has left."""

    EVENT = "event"  # the connection's end wakes somebody
    GRACE_2S = "grace_2s"  # of a stream, after two seconds; of an answer in one, every four
    POLL_1HZ = "poll_1hz"  # asked once a second
    WITH_RESULTS = "with_results"  # asked with every result, and once a second while none comes


class Order(StrEnum):
    """Where a stop stands among what has come for a turn."""

    FRONT = "front"  # before everything
    FIFO = "fifo"  # behind the requests that came before it


class Effect(StrEnum):
    """When a stop takes effect on a request that it finds in some place."""

    AT_ONCE = "at_once"  # in the turn that it comes in
    # With the result of the step in flight, else of one more; decoding, it is in one more anyway.
    NEXT_RESULT = "next_result"
    QUIET = "quiet"  # tried again in each turn until no step in flight has the request
    NEXT_SCHEDULE = "next_schedule"  # marked, and swept when the next step is planned
    ONE_TOKEN = "one_token"  # it becomes a prefill of one token, which ends it
    PREFILLED = "prefilled"  # when its prompt has been computed


class Requeue(StrEnum):
    """Where a preempted request goes."""

    FRONT = "front"
    TAIL = "tail"


class Reserve(StrEnum):
    """How many blocks must be left for those who run when another is admitted."""

    NONE = "none"
    BLOCK_EACH = "block_each"  # one for each to grow into, up to a sixteenth of all
    RATIO = "ratio"  # a share of what they may still generate; it adapts
    WHOLE = "whole"  # all that they may still need, so that nobody is ever preempted


@dataclass(frozen=True, slots=True)
class Effects:
    """``Effect`` by the place in which a stop finds a request."""

    compiling: Effect = Effect.AT_ONCE
    queued: Effect = Effect.AT_ONCE
    preempted: Effect = Effect.AT_ONCE
    prefilling: Effect = Effect.AT_ONCE
    decoding: Effect = Effect.AT_ONCE


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to stop, as a value."""

    name: str
    victim: Victim
    detection: Detection = Detection.EVENT
    order: Order = Order.FRONT
    effects: Effects = Effects()
    delivers_marked: bool = False  # tokens that come between a stop and its effect are delivered
    delivers_preempted: bool = True  # so is the token that was in flight at a preemption
    fenced: bool = True  # off-queue use waits for the last step launched over a block
    requeue: Requeue = Requeue.FRONT
    reserve: Reserve = Reserve.BLOCK_EACH
    evicts_on_preempt: int = 0  # steps for which those left find blocks: so much cache goes
    leaves_steps: bool = False  # rows of an ended request leave the step that runs
    ends_constrained: bool = False  # a preempted request with a grammar ends
    spares_oldest: bool = True  # who is first of all is never preempted; else the last that runs


GRACE_S = 2.0
UNARY_POLL_S = 4.0
POLL_S = 1.0


def detection_delay_s(detection: Detection, *, stream: bool, waited_s: float) -> float:
    """Seconds from a client's leaving to the stop, ``waited_s`` after its request came."""
    if detection is Detection.GRACE_2S:
        # A task in the background of a stream; who waits for the whole is asked now and then.
        return GRACE_S if stream else _to_the_next(UNARY_POLL_S, waited_s)
    # The next token of a stream asks as soon as anything could notice.
    if detection is Detection.POLL_1HZ or (detection is Detection.WITH_RESULTS and not stream):
        return _to_the_next(POLL_S, waited_s)
    return 0.0


def _to_the_next(period_s: float, waited_s: float) -> float:
    return math.ceil(waited_s / period_s) * period_s - waited_s
