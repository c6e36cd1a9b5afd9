"""TensorRT-LLM's ways, with its ``MAX_UTILIZATION`` scheduler.

Read at these commits: ``_torch/pyexecutor/py_executor.py`` 0004396, ``capacityScheduler.cpp``
02a10fe, ``executor/proxy.py`` 005bc84, ``serve/openai_server.py`` 0005772.

- detection: ``await_disconnected`` asks once a second, and then aborts the promise.
- order: ``abort_request`` puts a cancel in the request queue, behind the requests before it;
  ``_handle_special_queue_items`` collects the ids, and each pass applies them once, when it has the
  results of the step before.
- effects: a pass launches a step, then takes the results of the one before, then applies cancels:
  so a running request is in one more step, whose token the sampler drops (``GENERATION_COMPLETE``).
  What has been computed until then goes through the response queue. ``_try_cancel_request`` may
  fail, and is tried again in each pass: while a load or the save of a preempted request's KV is
  pending, or KV is in transmission.
- preempted in flight: ``_update_requests`` comes before ``_pause_requests``, so the token of the
  step in flight is kept, and its response is sent.
- not fenced: ``_handle_responses`` frees what it sees finished, and a paused request's blocks go
  before the step in flight has completed.
- victim: the last in the list of active requests that has started. It keeps its place there, so
  the oldest of those paused is first to be back in its context phase.
- reserve: none but what each scheduled request needs for its next step.
"""

from __future__ import annotations

from stopway_core.policies.victims import latest
from stopway_core.policy import Detection, Effect, Effects, Order, Policy, Reserve

TENSORRT_LLM = Policy(
    name="tensorrt-llm",
    victim=latest,
    detection=Detection.POLL_1HZ,
    order=Order.FIFO,
    effects=Effects(preempted=Effect.QUIET, prefilling=Effect.QUIET, decoding=Effect.NEXT_RESULT),
    delivers_marked=True,
    fenced=False,
    reserve=Reserve.NONE,
)
