"""When launched steps are done: stages in a row, steps in order, as the exec threads run them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from stopway_core.leaving import SHARED_ROWS_MIN, pays
from stopway_core.types import StepWork
from stopway_sim.fleet.cost import CostModel

LAYERS_TO_LEAVE = 2  # rows that are to leave during layer L are gone after L + 1, at the latest


class Chunk(NamedTuple):
    """Part of a prompt: so many ``tokens``, behind ``before`` others."""

    tokens: int
    before: int


@dataclass(slots=True)
class StepRun:
    """A launched step. ``ends[i]`` is when stage i has run it (seconds)."""

    work: StepWork
    ready: float  # when every rank of the first stage has its turn
    decode: dict[int, int]  # rid -> context in tokens, of rows that are still computed
    prefill: dict[int, Chunk]  # likewise
    stage_s: list[float]
    ends: list[float]
    dead: set[int] = field(default_factory=set)  # of ended requests
    done: bool = False


class Pipeline:
    """The steps in flight of one group.

    Stage i starts a step when it has run the step before and has the hidden states of stage i - 1:
    ``max(ends of the step before, ends of stage i - 1 + hop)``.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._runs: deque[StepRun] = deque()
        self._last: list[float] = [0.0] * cost.pipeline  # when each stage ran its last step

    def launch(
        self, now: float, work: StepWork, decode: dict[int, int], prefill: dict[int, Chunk]
    ) -> StepRun:
        """Start a step: contexts of decoding rows (in tokens) and chunks of prompts, by rid."""
        cost = self._cost
        ready = now + cost.turn_s + (cost.control_s if cost.ranks > 1 else 0.0)
        each = self._stage_s(decode, prefill)
        run = StepRun(work, ready, decode, prefill, [each] * cost.pipeline, [])
        self._schedule(run, self._runs[-1].ends if self._runs else self._last)
        self._runs.append(run)
        return run

    def result_at(self, run: StepRun) -> float:
        """When the leader has the result: at once where it samples itself."""
        return run.ends[-1] + (self._cost.control_s if self._cost.pipeline > 1 else 0.0)

    def finish(self, run: StepRun) -> None:
        """The leader has the result of the oldest step."""
        self._runs.popleft()
        self._last = run.ends
        run.done = True

    def leave(self, now: float, rids: set[int]) -> list[StepRun]:
        """Rows of ended requests leave the steps in flight between two layers, where it pays.

        Returns the steps whose times have changed.
        """
        changed: list[StepRun] = []
        before = self._last
        for run in self._runs:
            run.dead |= {rid for rid in rids if rid in run.prefill or rid in run.decode}
            gone = self._pays(run)
            if gone:
                self._shorten(run, now)
            if gone or changed:
                self._schedule(run, before)
                changed.append(run)
            before = run.ends
        return changed

    def _pays(self, run: StepRun) -> bool:
        prefill = run.prefill
        total = len(run.decode) + sum(chunk.tokens for chunk in prefill.values())
        dead = sum(prefill[rid].tokens if rid in prefill else 1 for rid in run.dead)
        shared = self._cost.tensor > 1
        return pays(dead, total) and (not shared or total >= SHARED_ROWS_MIN)

    def _shorten(self, run: StepRun, now: float) -> None:
        cost = self._cost
        for rid in run.dead:
            run.decode.pop(rid, None)
            run.prefill.pop(rid, None)
        run.dead.clear()
        less = self._stage_s(run.decode, run.prefill) if run.decode or run.prefill else 0.0
        layers = max(1, cost.layers // cost.pipeline)
        for stage, end in enumerate(run.ends):
            whole = run.stage_s[stage]
            start = end - whole
            passed = (now - start) / whole * layers if now > start else -LAYERS_TO_LEAVE
            left = max(0.0, 1.0 - (int(passed) + LAYERS_TO_LEAVE) / layers)
            run.stage_s[stage] = whole - (whole - less) * min(1.0, left)

    def _stage_s(self, decode: dict[int, int], prefill: dict[int, Chunk]) -> float:
        """Seconds of each stage."""
        tokens = pairs = 0
        for chunk in prefill.values():
            tokens += chunk.tokens
            pairs += chunk.tokens * chunk.before
        whole = self._cost.step_s(len(decode), tokens, sum(decode.values()), pairs)
        return whole / self._cost.pipeline

    def _schedule(self, run: StepRun, before: list[float]) -> None:
        hop = self._cost.hop_s
        ends: list[float] = []
        at = run.ready
        for stage, seconds in enumerate(run.stage_s):
            at = max(at, before[stage]) + seconds
            ends.append(at)
            at += hop
        run.ends = ends
