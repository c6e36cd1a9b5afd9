"""When launched steps are done: stages in a row, steps in order, as the exec threads run them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stopway_core.types import StepWork
from stopway_sim.fleet.cost import CostModel

LAYERS_TO_AGREE = 2  # rows that are to leave at layer L are gone after L + 2


@dataclass(slots=True)
class StepRun:
    """A launched step. ``ends[i]`` is when stage i has run it (seconds)."""

    work: StepWork
    ready: float  # when every rank of the first stage has its turn
    decode_rows: int
    prefill: dict[int, int]  # rid -> tokens that are still computed
    stage_s: list[float]
    ends: list[float]
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

    def launch(self, now: float, work: StepWork, decode: int, prefill: dict[int, int]) -> StepRun:
        """Start a step of ``decode`` rows and ``prefill`` tokens by rid."""
        cost = self._cost
        ready = now + cost.turn_s + (cost.control_s if cost.ranks > 1 else 0.0)
        each = cost.step_s(decode, sum(prefill.values())) / cost.pipeline
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
        """Rows of ended requests leave their prefill steps between two layers.

        Returns the steps whose times have changed.
        """
        changed: list[StepRun] = []
        before = self._last
        for run in self._runs:
            gone = [rid for rid in rids if rid in run.prefill]
            if gone:
                self._shorten(run, now, gone, before)
            if gone or changed:
                self._schedule(run, before)
                changed.append(run)
            before = run.ends
        return changed

    def _shorten(self, run: StepRun, now: float, gone: list[int], before: list[float]) -> None:
        cost = self._cost
        for rid in gone:
            del run.prefill[rid]
        less = cost.step_s(run.decode_rows, sum(run.prefill.values())) / cost.pipeline
        layers = max(1, cost.layers // cost.pipeline)
        for stage, end in enumerate(run.ends):
            whole = run.stage_s[stage]
            start = end - whole
            passed = (now - start) / whole * layers if now > start else -LAYERS_TO_AGREE
            left = max(0.0, 1.0 - (int(passed) + LAYERS_TO_AGREE) / layers)
            run.stage_s[stage] = whole - (whole - less) * min(1.0, left)

    def _schedule(self, run: StepRun, before: list[float]) -> None:
        hop = self._cost.hop_s
        ends: list[float] = []
        at = run.ready
        for stage, seconds in enumerate(run.stage_s):
            at = max(at, before[stage]) + seconds
            ends.append(at)
            at += hop
        run.ends = ends
