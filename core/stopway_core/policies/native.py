"""Stopway's own policy: the best of the five, and what none of them does.

- A stop takes effect in the turn that it comes in, wherever it finds its request. From llama.cpp:
  it goes before all else that has come. From vLLM: the terminal event does not wait for blocks.
- Tokens in flight at a stop are discarded and counted; those in flight at a preemption are
  delivered (vLLM), since they need not be computed again.
- Rows of a request that has ended leave the step that runs, between two layers (nobody's).
- Blocks are fenced where use is not ordered behind the steps in flight (vLLM), and only there.
- The victim is who wastes the least work, never one that frees nothing; it goes to the front
  (vLLM), and a constrained request is restored with its grammar's state.
"""

from __future__ import annotations

from stopway_core.policies.victims import least_wasted_work
from stopway_core.policy import Policy

NATIVE = Policy(name="native", victim=least_wasted_work, leaves_steps=True)
