"""How long it takes until a client's leaving counts: at once, unless a policy emulates another's.

The connection's end is noticed at once here; what another front end would notice later is held back
for as long.
"""

from __future__ import annotations

import math

from stopway_core.policies import POLICIES
from stopway_core.policy import Detection

GRACE_S = 2.0
POLL_S = 1.0


def delay_s(policy: str, *, stream: bool, waited_s: float) -> float:
    """Seconds from a client's leaving to the stop, ``waited_s`` after its request came.

    ``policy`` is the group's by its name; one that is not known here has no delay.
    """
    known = POLICIES.get(policy)
    detection = known.detection if known is not None else Detection.EVENT
    if detection is Detection.GRACE_2S:
        # A task in the background of a stream; a call that is waited for is ended by an exception.
        return GRACE_S if stream else 0.0
    if detection is Detection.POLL_1HZ:
        return math.ceil(waited_s / POLL_S) * POLL_S - waited_s
    return 0.0
