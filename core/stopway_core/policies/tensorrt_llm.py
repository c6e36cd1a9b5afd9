"""TensorRT-LLM's ways (``_torch/pyexecutor/py_executor.py``, ``serve/openai_server.py``).

- detection: ``await_disconnected`` asks once a second.
- order: a cancelling request stands in the request queue behind those before it.
- effects: ``_try_cancel_request`` may fail, and is tried again in each pass: while a preemption is
  pending, a load is pending, or KV is in transmission. What has been computed until then goes
  through the response queue.
- not fenced: the response pass frees what it sees finished.
- victim: the capacity scheduler pauses who started last; it is back in its context phase, first.
"""

from __future__ import annotations

from stopway_core.policies.victims import latest
from stopway_core.policy import Detection, Effect, Effects, Order, Policy

TENSORRT_LLM = Policy(
    name="tensorrt-llm",
    victim=latest,
    detection=Detection.POLL_1HZ,
    order=Order.FIFO,
    effects=Effects(preempted=Effect.QUIET, prefilling=Effect.QUIET, decoding=Effect.QUIET),
    delivers_marked=True,
    delivers_preempted=False,
    fenced=False,
)
