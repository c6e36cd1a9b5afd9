"""llama.cpp's server's ways (``tools/server/server-queue.cpp``, ``server-context.cpp``).

- detection: ``should_stop`` is asked by everything that waits.
- order: a cancel task goes to the front of the queue; deferred siblings are cleaned as it is
  posted.
- effects: tasks are taken between two decode calls, so a slot is released once the call in which
  it takes part is over; results that come later are filtered by their task id.
- not fenced: there is one process and nothing but the decode call writes.
- never preempts: a slot has its whole context, and new work waits for one.
"""

from __future__ import annotations

from stopway_core.policies.victims import nobody
from stopway_core.policy import Effect, Effects, Policy, Reserve

LLAMACPP = Policy(
    name="llamacpp",
    victim=nobody,
    effects=Effects(prefilling=Effect.QUIET, decoding=Effect.QUIET),
    fenced=False,
    reserve=Reserve.WHOLE,
)
