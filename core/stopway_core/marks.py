"""Stops that have come and have yet to take effect: only policies that emulate others have any.

``native`` ends a request in the turn in which its stop comes; see ``policy.Effect`` for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stopway_core.lifecycle import State
from stopway_core.policy import Effect, Effects
from stopway_core.replica import Replica
from stopway_core.requests import Choice
from stopway_core.types import Reason, Stop


@dataclass(slots=True)
class Mark:
    """A request that is to end, and what it waits for."""

    effect: Effect
    reason: Reason
    keep: int | None  # output tokens to be delivered; None: all that come
    turn: int  # in which it was made
    step: int  # newest launched at that time
    waits_for: int  # a step in flight with the request; 0: one that is not launched yet
    stops: list[Stop] = field(default_factory=list)


def effect_on(effects: Effects, choice: Choice) -> Effect:
    """When a stop takes effect on a request where it is now."""
    if choice.state is State.QUEUED:
        return effects.preempted if choice.preemptions else effects.queued
    return {
        State.COMPILING: effects.compiling,
        State.PREFILLING: effects.prefilling,
        State.DECODING: effects.decoding,
    }[choice.state]


def is_due(mark: Mark, choice: Choice, replica: Replica, turn: int) -> bool:
    """Whether a mark's time has come, in turn number ``turn``."""
    seq = choice.seq
    match mark.effect:
        case Effect.AT_ONCE:
            return True
        case Effect.NEXT_SCHEDULE:
            return turn > mark.turn
        case Effect.PREFILLED | Effect.ONE_TOKEN:
            return choice.state is State.DECODING
        case Effect.QUIET:
            return choice.stale_step <= replica.processed and (
                seq is None or seq.last_step <= replica.processed
            )
    if seq is None:  # NEXT_RESULT, and it does not run any more
        return True
    if not mark.waits_for:
        if choice.state is State.PREFILLING:  # between two chunks
            return True
        if seq.last_step <= mark.step:
            return False
        mark.waits_for = seq.last_step
    return replica.processed >= mark.waits_for


def may_launch(choice: Choice) -> bool:
    """Whether a request may be in the next step as far as its mark goes."""
    mark = choice.mark
    if mark is None:
        return True
    if mark.effect is Effect.NEXT_RESULT:
        # Once more, also when a step in flight will end it: its result is not known yet.
        seq = choice.seq
        return choice.state is State.DECODING and seq is not None and seq.last_step <= mark.step
    if mark.effect in (Effect.PREFILLED, Effect.ONE_TOKEN):
        return choice.state is not State.DECODING
    return False
