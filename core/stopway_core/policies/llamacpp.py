"""llama.cpp's server's ways, read in ``tools/server`` at commit 0c1e570.

- detection: ``should_stop`` is asked before each chunk of a stream, and by a wait for a result
  (``server_response_reader::next``) after each second in which no result has come.
- order: ``stop()`` puts a cancel task to the front of the queue. As it is posted, the target is
  taken out of the queue, of the deferred tasks and of those that came during a decode call.
- effects: ``process_single_task`` declines a cancel while a decode call runs, so a slot is released
  once the call in which it takes part is over, and has been sampled from.
- what comes later is filtered: ``send()`` drops a result whose task id nobody waits for, and
  ``stop()`` lets those go that were not read yet.
- not fenced: there is one process and nothing but the decode call writes.
- never preempts: a slot has its whole context, and new work is deferred until one is released
  (``pop_deferred_task``: first in, first out, before what came later). So it is without
  ``--kv-unified``; with it, slots share the blocks, and all of them fail when none is left.
- the KV of a released slot stays for whoever comes with the same prefix.
"""

from __future__ import annotations

from stopway_core.policies.victims import nobody
from stopway_core.policy import Detection, Effect, Effects, Policy, Reserve

LLAMACPP = Policy(
    name="llamacpp",
    victim=nobody,
    detection=Detection.WITH_RESULTS,
    effects=Effects(prefilling=Effect.QUIET, decoding=Effect.QUIET),
    fenced=False,
    reserve=Reserve.WHOLE,
)
