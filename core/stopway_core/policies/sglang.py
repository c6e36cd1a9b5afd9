"""SGLang's ways, with its default options. Read in release 0.5.23, under ``srt/managers``.

- detection: of a stream, ``create_abort_task`` (``tokenizer_manager.py``): a background task that
  aborts two seconds after the connection has ended; of an answer in one, ``_wait_one_response``,
  which asks when nothing has come for four seconds.
- order: ``process_input_requests`` (``scheduler.py``): first in, first out.
- effects: ``abort_request`` (``scheduler.py``). Method 1: popped from the waiting queue at once.
  Method 2: a request whose grammar is being compiled becomes a prefill of one token. Method 3,
  ``to_finish``: the next result ends a running request, which takes part in one more decode step,
  also when a step in flight will end it: a step is launched before the last one's result is read.
  A chunked prefill ends with its chunk.
- what comes between is not delivered.
- not fenced: the result that ends it releases, into the tree, with one more step in flight.
- victim: ``retract_decode``, ``_get_decode_retraction_order`` (``schedule_batch.py``): fewest
  outputs, then longest prompts, then who came into the batch last, until the next step fits; the
  oldest, too, but one is kept. The token in flight is lost.
- requeue: ``_add_request_to_queue``: the tail of the waiting queue.
- reserve: ``NewTokenRatioTracker``, ``PrefillAdder``: the ratio sinks with each decode step, is set
  by a retraction, and starts anew when the server is idle.
- cached tokens for 20 more steps of those left are evicted (``SGLANG_RETRACT_DECODE_STEPS``), so
  that the room is there at once.

What differs on purpose stands in docs/policies.md.
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
    spares_oldest=False,
)
