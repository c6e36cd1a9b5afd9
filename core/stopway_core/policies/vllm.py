"""vLLM V1's ways. Read in release 0.32.0: ``v1/core/sched/scheduler.py``, ``v1/engine/core.py``.

- detection: ``with_cancellation`` races the handler against the end of the connection.
- order: an abort is put in two queues, to be seen early and in its place. Aborting twice is
  aborting once, so the early one is what counts: before everything else.
- effects: ``finish_requests`` ends a request at once, wherever it is. (The loop comes to it when
  the step that it waits for has ended; here the leader never waits.)
- preempted in flight: output of steps in flight is stale: delivered, the counters frozen.
- fenced: ``_request_blocks_can_be_freed``, the step fence of deferred frees.
- victim: the tail of the running list; by priority, the worst of (priority, arrival).
- requeue: ``waiting.prepend_request``; everything is computed again.
- reserve: none but the request's own blocks (``scheduler_reserve_full_isl``, ``watermark`` 0).

What differs stands in docs/policies.md.
"""

from __future__ import annotations

from stopway_core.policies.victims import latest
from stopway_core.policy import Policy, Reserve

VLLM = Policy(name="vllm", victim=latest, reserve=Reserve.NONE)
