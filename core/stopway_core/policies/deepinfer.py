"""DeepInfer's ways. Read in release 0.1.0: ``csrc/engine/scheduler.hpp``, ``engine/llm_engine.py``.

- detection: whoever calls ``abort_request`` has seen it; the release has no server.
- effects: ``abort_sequence`` marks a request ``FINISHED_ABORTED`` in both queues, and the next
  ``_schedule`` sweeps it (also when nothing but decodes is planned, or an idle group would keep it
  for ever); a prefill runs to its end ("no abort in PE").
- what comes between is delivered; the output objects go one beat later (``DeferredRelease``).
- not fenced: the step that sweeps frees, with the step before it in flight.
- victim: ``_schedule_decode``: the longest output, the oldest's, too, while more than one is left.
  What was in flight with it is lost, and it goes to the front. ``_preempt``: a constrained request
  ends as ``FINISHED_PREEMPTED``: it can't be computed again.

What differs, on purpose or in the release, stands in docs/policies.md.
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
    spares_oldest=False,
)
