"""What of a policy lies outside of the planner: who hears of a disconnect when, and by what queue.

The planner takes the policy itself. Here are the things that happen before and beside it:

- ``detection``: when a gateway knows that a client has gone.
- ``order``: a stop that is first in, first out waits at the leader's intake behind the
  submissions that came before it; any other overtakes them.
- ``fenced``: off-queue use waits until the last step launched over a block has completed.
"""

from __future__ import annotations

from dataclasses import dataclass

from stopway_core.policy import Detection, Order, Policy, detection_delay_s


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

    def detection_s(self, waited_s: float) -> float:
        """Seconds from a client's going, ``waited_s`` after its request came, to the stop.

        Every answer is a stream.
        """
        return detection_delay_s(self.detection, stream=True, waited_s=waited_s)
