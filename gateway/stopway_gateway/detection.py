"""How long it takes until a client's leaving counts: at once, unless a policy emulates another's.

The connection's end is noticed at once here; what another front end would notice later is held back
for as long.
"""

from __future__ import annotations

from stopway_core.policies import POLICIES
from stopway_core.policy import detection_delay_s


def delay_s(policy: str, *, stream: bool, waited_s: float) -> float:
    """Seconds from a client's leaving to the stop, ``waited_s`` after its request came.

    ``policy`` is the group's by its name; one that is not known here has no delay.
    """
    known = POLICIES.get(policy)
    if known is None:
        return 0.0
    return detection_delay_s(known.detection, stream=stream, waited_s=waited_s)
