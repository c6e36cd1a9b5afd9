"""From measurements to a cost model, and the model beside the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_sim.fleet.config import FleetConfig
from stopway_sim.fleet.cost import CostModel, Points, curve
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import is_duration
from stopway_sim.fleet.run import simulate
from stopway_sim.fleet.workload import Spec, Workload


def calibrate(measured: Mapping[str, Any], otherwise: CostModel | None = None) -> CostModel:
    """The cost model that step times say; ``otherwise`` has what they don't (messages, limits).

    ``measured["step_times"]`` is a list of ``{"decode": rows, "prefill": tokens, "seconds": s}``,
    one for each measured step: at least two different numbers of decoding rows alone, and one step
    with prefill tokens. The median of equal steps counts, and of prefills of similar size (up to
    twice each other), whose small differences would make for wild slopes. ``measured["cost"]``,
    when there, has more fields of the model (tensor, blocks, control_s ...). Raises ``FleetError``.
    """
    model = otherwise or CostModel()
    steps = _steps(measured.get("step_times"))
    alone = {rows: s for (rows, tokens), s in steps.items() if rows and not tokens}
    if len(alone) < 2 or not any(tokens for _, tokens in steps):
        raise FleetError(
            "step_times: measure steps of at least two numbers of decoding rows without prefill, "
            "and at least one with prefill tokens"
        )
    (x1, y1), (x2, y2) = sorted(alone.items())[:2]
    base = min(y1, max(0.0, y1 - (y2 - y1) / (x2 - x1) * x1))
    decode = _rising({rows: s - base for rows, s in alone.items()})
    prefill: dict[int, list[tuple[int, float]]] = {}
    for (rows, tokens), s in steps.items():
        if tokens:
            own = s - base - curve(decode, rows)
            prefill.setdefault(tokens.bit_length(), []).append((tokens, own))
    points = _rising(
        {
            round(median(tokens for tokens, _ in found)): median(s for _, s in found)
            for found in prefill.values()
        }
    )
    cost = measured.get("cost", {})
    if not isinstance(cost, Mapping):
        raise FleetError("cost: the measurements' cost must be an object of the model's fields")
    more = {**model.to_json(), **cost}
    return CostModel.from_json({**more, "base_s": base, "decode": decode, "prefill": points})


def _steps(found: Any) -> dict[tuple[int, int], float]:
    if not isinstance(found, list):
        raise FleetError("step_times: the measurements must have a list of that name")
    steps: dict[tuple[int, int], list[float]] = {}
    for index, step in enumerate(found):
        try:
            rows, tokens = int(step["decode"]), int(step["prefill"])
            seconds = float(step["seconds"])
        except (KeyError, TypeError, ValueError, OverflowError):
            rows = tokens = -1
            seconds = 0.0
        if rows < 0 or tokens < 0 or not seconds or not is_duration(seconds):
            raise FleetError(
                f"step_times[{index}]: give decode (rows), prefill (tokens) and seconds (> 0)"
            )
        steps.setdefault((rows, tokens), []).append(seconds)
    return {key: median(values) for key, values in sorted(steps.items())}


def _rising(points: Mapping[int, float]) -> Points:
    """By amount, each not below the one before: noise must not make more work cheaper."""
    found: list[tuple[int, float]] = []
    least = 0.0
    for amount, seconds in sorted(points.items()):
        least = max(least, seconds)
        found.append((amount, least))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SmallRun:
    """A workload that the real engine can run in seconds: ``streams`` at once, all alike.

    With ``cancel_after`` every client calls cancel when it has so many tokens.
    """

    streams: int
    prompt: int
    output: int
    cancel_after: int | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure as measured and as simulated; ``error`` is relative to the measured one."""

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float | None:
        """0.1: the simulation says 10 % more. None for a measurement of 0."""
        return self.simulated / self.measured - 1 if self.measured else None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        error = self.error
        return {
            "name": self.name,
            "measured": self.measured,
            "simulated": round(self.simulated, 6),
            "error": None if error is None else round(error, 4),
        }


def beside(
    run: SmallRun,
    cost: CostModel,
    measured: Mapping[str, float],
    policy: Policy = POLICIES["native"],
) -> list[Figure]:
    """The figures of ``measured`` that the simulation has, too.

    Known are ``tokens_per_s``, ``first_token_ms``, ``stopped_ms`` and ``reclaimed_ms`` (medians;
    the last two from the client's cancel).
    """
    found = small_figures(run, cost, policy)
    return [Figure(name, measured[name], found[name]) for name in found if name in measured]


def small_figures(
    run: SmallRun, cost: CostModel, policy: Policy = POLICIES["native"]
) -> dict[str, float]:
    """What the simulation says of ``run`` on one group."""
    specs = [
        Spec(i, 0.0, own=run.prompt, output=run.output, cancel_after_tokens=run.cancel_after)
        for i in range(run.streams)
    ]
    longest = run.prompt + run.output
    cost = replace(cost, max_model_len=max(cost.max_model_len, longest))
    config = FleetConfig(groups=1, cost=cost, policy=policy)
    report = simulate(config, Workload(requests=run.streams), seed=0, trace=specs)
    series = report.tally.series
    figures = {"tokens_per_s": report.rate("delivered")}
    names = {
        "first_token": "first_token_ms",
        "effective": "stopped_ms",
        "reclaimed": "reclaimed_ms",
    }
    for name, figure in names.items():
        if series[name]:
            figures[figure] = median(series[name]) * 1000
    return figures
