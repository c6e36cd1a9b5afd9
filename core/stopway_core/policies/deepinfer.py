"""DeepInfer's ways (``csrc/engine/scheduler.hpp``, ``deepinfer/engine/llm_engine.py``).

- detection: whoever calls ``abort`` has seen it.
- effects: a request is marked ``FINISHED_ABORTED`` in both queues, and swept when the next step is
  planned (also when nothing but decodes is planned, or an idle group would keep it for ever);
  a prefill runs to its end ("no abort in PE").
- what comes between is delivered; the output objects go one beat later (``DeferredRelease``).
- not fenced: the next schedule frees.
- victim: the longest output. A constrained request that is preempted ends as
  ``FINISHED_PREEMPTED``: it can't be computed again.
"""

from __future__ import annotations

from stopway_core.policies.victims import longest_output
from stopway_core.policy import Effect, Effects, Policy

DEEPINFER = Policy(
    name="deepinfer",
    victim=longest_output,
    effects=Effects(
        queued=Effect.NEXT_SCHEDULE,
        preempted=Effect.NEXT_SCHEDULE,
        prefilling=Effect.PREFILLED,
        decoding=Effect.NEXT_SCHEDULE,
    ),
    delivers_marked=True,
    delivers_preempted=False,
    fenced=False,
    ends_constrained=True,
)
