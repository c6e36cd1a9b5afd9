"""What of a policy lies outside of the planner: who hears of a disconnect when, and by what queue.

The planner takes the policy itself. Here are the things that happen before and beside it:

- ``detection``: when a gateway knows that a client has gone.
- ``order``: a stop that is first in, first out waits at the leader's intake behind the
  submissions that came before it; any other overtakes them.
- ``fenced``: off-queue use waits until the last step launched over a block has completed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stopway_core.policy import Detection, Order, Policy

GRACE_S = 2.0
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Outside:
    """A policy as far as it acts outside of the planner."""

    detection: Detection
    stops_overtake: bool
    fenced: bool

    @classmethod
    def of(cls, policy: Policy) -> Outside:
        """Read the policy's choices."""
        return cls(policy.detection, policy.order is not Order.FIFO, policy.fenced)

    def detected_at(self, gone_at: float) -> float:
        """When the gateway issues the stop for a client that went at ``gone_at`` (seconds)."""
        if self.detection is Detection.GRACE_2S:
            return gone_at + GRACE_S
        if self.detection is Detection.POLL_1HZ:
            return (math.floor(gone_at / POLL_S) + 1) * POLL_S
        return gone_at
