"""What a group's planner is told once."""

from __future__ import annotations

from dataclasses import dataclass, field

from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_core.types import Deadlines

NO_DEADLINES = Deadlines()


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Bounds of one group. Times in seconds."""

    max_model_len: int
    eos_ids: frozenset[int] = frozenset()
    max_running: int = 256
    max_waiting: int = 16_384
    max_batch_tokens: int = 512  # tokens of the steps in flight, decodes and prefill chunks
    stages: int = 1  # of the pipeline
    window: int = 1  # steps in flight; above 1, one stage overlaps steps, several take turns
    draft_tokens: int = 0  # of one proposal, at most; 0: no drafts
    deadlines: Deadlines = NO_DEADLINES  # of the service; a request's own can be tighter
    submit_age_s: float = 30.0
    policy: Policy = field(default_factory=lambda: POLICIES["native"])

    @property
    def step_tokens(self) -> int:
        """Tokens of one step at most."""
        return -(-self.max_batch_tokens // self.stages)
