"""SGLang's ways (``managers/scheduler.py``, ``schedule_batch.py``, ``tokenizer_manager.py``).

- detection: a background task that aborts two seconds after a stream's connection has ended.
- order: aborts come with the requests, first in, first out.
- effects: method 1, popped from the waiting queue at once; method 2, a request whose grammar is
  being compiled becomes a prefill of one token; method 3, ``to_finish``: a running request takes
  part in one more decode step, and a chunked prefill ends with its chunk.
- what comes between is not delivered.
- not fenced: the end of the batch releases.
- victim: ``_get_decode_retraction_order``: fewest outputs, then longest prompts; one is kept.
- requeue: the tail of the waiting queue. The admission ratio adapts; cached tokens for 20 more
  steps of those left are evicted (``RETRACT_DECODE_STEPS``), so that the room is there at once.
"""

from __future__ import annotations

from stopway_core.policies.victims import fewest_outputs
from stopway_core.policy import (
    Detection,
    Effect,
    Effects,
    Order,
    Policy,
    Requeue,
    Reserve,
)

SGLANG = Policy(
    name="sglang",
    victim=fewest_outputs,
    detection=Detection.GRACE_2S,
    order=Order.FIFO,
    effects=Effects(
        compiling=Effect.ONE_TOKEN, prefilling=Effect.NEXT_RESULT, decoding=Effect.NEXT_RESULT
    ),
    delivers_preempted=False,
    fenced=False,
    requeue=Requeue.TAIL,
    reserve=Reserve.RATIO,
    evicts_on_preempt=20,
)
