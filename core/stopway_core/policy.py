"""What a policy may choose. A policy decides, the ledger moves.

A strategy exists only where policies differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that could be preempted, in the numbers that a choice needs."""

    rid: int
    arrival: int  # order of arrival; smaller is older
    output_len: int  # tokens generated
    prompt_len: int
    recompute: int  # tokens whose KV would have to be computed again
    frees: int  # blocks that nobody else holds


Victim = Callable[[Sequence[Candidate], int], Candidate | None]
"""(candidates, blocks short) -> whom to preempt, or None when nobody's going would help."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to stop, as a value."""

    name: str
    victim: Victim
