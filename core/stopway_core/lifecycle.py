"""The life of a request on its leader, as a table. A pair that is not in it is a bug and raises.

    COMPILING --ready--> QUEUED --admit--> PREFILLING --token--> DECODING
                           ^                   |                    |
                           +-----preempt-------+-----preempt--------+
    any but ENDED --end--> ENDED

A stop is a signal and not a state: it ends a request from wherever it is.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    COMPILING = "compiling"  # on the leader only; its grammar is not ready yet
    QUEUED = "queued"  # on the leader only; holds nothing
    PREFILLING = "prefilling"  # in every replica; its known tokens are being computed
    DECODING = "decoding"  # each step adds a token
    ENDED = "ended"  # has an outcome; holds nothing


class Event(StrEnum):
    READY = "ready"  # its grammar is compiled
    ADMIT = "admit"
    TOKEN = "token"  # the first token since it was admitted
    PREEMPT = "preempt"
    END = "end"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.COMPILING, Event.READY): State.QUEUED,
    (State.COMPILING, Event.END): State.ENDED,
    (State.QUEUED, Event.ADMIT): State.PREFILLING,
    (State.PREFILLING, Event.TOKEN): State.DECODING,
    (State.PREFILLING, Event.PREEMPT): State.QUEUED,
    (State.DECODING, Event.PREEMPT): State.QUEUED,
    (State.QUEUED, Event.END): State.ENDED,
    (State.PREFILLING, Event.END): State.ENDED,
    (State.DECODING, Event.END): State.ENDED,
}


class IllegalTransition(AssertionError):
    """An event that cannot happen in that state: a bug, never a condition to handle."""


def after(state: State, event: Event) -> State:
    """The state that follows. Raises ``IllegalTransition`` for a pair that is not in the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} in state {state}") from None
