"""What a step computes, in the sums that a simulation's cost model is calibrated with."""

from __future__ import annotations

from dataclasses import dataclass

from stopway_core.turn import Launch
from stopway_core.types import StepWork

StepTime = tuple[int, int, int, int, int, float]
"""(step, decode, prefill, context, pairs, seconds), of ``StepShape``: an entry of ``step_times``.

A step that may have been cut short has none: their numbers have gaps.
"""


@dataclass(slots=True)
class StepShape:
    """A step's size, and whom it is for."""

    step: int
    decode: int  # rows that decode, drafts included
    prefill: int  # tokens of prompts
    context: int  # tokens before the rows that decode, of all of them together
    pairs: int  # of a prompt's tokens and those before their chunk, in products
    rids: set[int]  # membership only

    @classmethod
    def of(cls, launch: Launch, work: StepWork) -> StepShape:
        """Read a step that is being launched: one pass over its rows, not over their contexts."""
        decoding, prefill = len(launch.decode), sum(launch.counts)
        return cls(
            step=launch.step,
            decode=launch.tokens - prefill,
            prefill=prefill,
            context=sum([row.start for row in work.rows[:decoding]]),
            pairs=sum([row.start * len(row.tokens) for row in work.rows[decoding:]]),
            rids={*launch.decode, *launch.prefill},
        )

    def timed(self, seconds: float) -> StepTime:
        """With what it took."""
        return self.step, self.decode, self.prefill, self.context, self.pairs, seconds
