"""From measurements to a cost model, and the model beside the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_sim.fleet.config import FleetConfig
from stopway_sim.fleet.cost import CostModel, Points, curve
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import COUNT_MAX, is_duration
from stopway_sim.fleet.run import simulate
from stopway_sim.fleet.workload import Spec, Workload


class _Step(NamedTuple):
    """A measured step: ``prefill`` tokens, ``context`` and ``pairs`` as ``CostModel`` has them."""

    decode: int
    prefill: int
    context: int
    pairs: int
    seconds: float


def calibrate(measured: Mapping[str, Any], otherwise: CostModel | None = None) -> CostModel:
    """The cost model that step times say; ``otherwise`` has what they don't (messages, limits).

    ``measured["step_times"]`` is a list of ``{"decode": rows, "prefill": tokens, "context": of the
    rows, "pairs": of the tokens, "seconds": s}``, one for each measured step: at least two
    different numbers of decoding rows alone, and one step with prefill tokens.
    ``measured["cost"]``, when there, has more fields of the model (tensor, blocks, control_s ...).
    Raises ``FleetError``.

    What context costs is found first, from steps that are equal but for their context, so that
    nothing else matters (``_slope``); 0 where there are none. Without that, the median of equal
    steps counts, and of prefills of similar size (up to twice each other), whose small differences
    would make for wild slopes. Curves rise (``_rising``).
    """
    model = otherwise or CostModel()
    steps = _steps(measured.get("step_times"))
    alone = [step for step in steps if step.decode and not step.prefill]
    chunks = [step for step in steps if step.prefill]
    if len({step.decode for step in alone}) < 2 or not chunks:
        raise FleetError(
            "step_times: measure steps of at least two numbers of decoding rows without prefill, "
            "and at least one with prefill tokens"
        )
    context_s = _slope([(step.decode, step.context, step.seconds) for step in alone])
    base, decode = _base_and_decode(alone, context_s)
    own = [
        step.seconds - base - curve(decode, step.decode) - context_s * step.context
        for step in chunks
    ]
    sizes = [step.prefill for step in chunks]
    pairs = [step.pairs for step in chunks]
    pair_s = _slope(list(zip(sizes, pairs, own, strict=True)))
    prefill = _prefill(sizes, [s - pair_s * n for s, n in zip(own, pairs, strict=True)])
    cost = measured.get("cost", {})
    if not isinstance(cost, Mapping):
        raise FleetError("cost: the measurements' cost must be an object of the model's fields")
    found = {
        "base_s": base,
        "decode": decode,
        "prefill": prefill,
        "context_token_s": context_s,
        "prefill_pair_s": pair_s,
    }
    return CostModel.from_json({**model.to_json(), **cost, **found})


def _steps(found: Any) -> list[_Step]:
    if not isinstance(found, list):
        raise FleetError("step_times: the measurements must have a list of that name")
    return [_step(index, step) for index, step in enumerate(found)]


def _step(index: int, found: Any) -> _Step:
    try:
        step = _Step(
            int(found["decode"]),
            int(found["prefill"]),
            int(found["context"]),
            int(found["pairs"]),
            float(found["seconds"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        step = _Step(-1, -1, -1, -1, 0.0)
    possible = (
        0 <= step.decode <= COUNT_MAX
        and 0 <= step.prefill <= COUNT_MAX
        and 0 <= step.context <= step.decode * COUNT_MAX
        and 0 <= step.pairs <= step.prefill * COUNT_MAX
    )
    if not possible or not step.seconds or not is_duration(step.seconds):
        raise FleetError(
            f"step_times[{index}]: give decode (rows), prefill (tokens), context (tokens, of those "
            "rows), pairs (of those tokens and the ones before them) and seconds (> 0)"
        )
    return step


def _base_and_decode(alone: Sequence[_Step], context_s: float) -> tuple[float, Points]:
    """Of decoding steps: the base is where the line through the least two numbers begins."""
    rows: dict[int, list[float]] = {}
    for step in alone:
        rows.setdefault(step.decode, []).append(step.seconds - context_s * step.context)
    medians = {count: median(found) for count, found in sorted(rows.items())}
    if min(medians.values()) <= 0:
        raise FleetError(
            "step_times: longer contexts would explain all that a step takes; measure steps of "
            "the same decoding rows with more, and more different, contexts"
        )
    (x1, y1), (x2, y2) = list(medians.items())[:2]
    base = min(y1, max(0.0, y1 - (y2 - y1) / (x2 - x1) * x1))
    return base, _rising({count: [s - base for s in found] for count, found in rows.items()})


def _prefill(sizes: Sequence[int], seconds: Sequence[float]) -> Points:
    """Of chunks, in tokens, and what each took of its step for itself."""
    similar: dict[int, list[tuple[int, float]]] = {}
    for size, s in zip(sizes, seconds, strict=True):
        similar.setdefault(size.bit_length(), []).append((size, s))
    points = _rising(
        {
            round(median(size for size, _ in found)): [s for _, s in found]
            for found in similar.values()
        }
    )
    if not points[-1][1]:
        raise FleetError(
            "step_times: prefill tokens would take no time; measure steps of prefill alone, of "
            "several sizes, and with more different contexts"
        )
    return points


def _slope(steps: Sequence[tuple[int, int, float]]) -> float:
    """How much a value rises with x, of (group, x, value); never below 0.

    Theil's incomplete method in each group of alike steps whose greatest x is at least twice its
    least: by x, each of the lower half with its counterpart in the upper one; of all these slopes
    the median, weighted by the distances in x (Jaeckel). So it stands up to steps that something
    else made slow, up to a quarter of all, and near points count for little.
    """
    groups: dict[int, list[tuple[int, float]]] = {}
    for group, x, value in steps:
        groups.setdefault(group, []).append((x, value))
    slopes: list[tuple[float, int]] = []
    for points in groups.values():
        points.sort()
        if points[-1][0] < 2 * max(1, points[0][0]):
            continue
        upper = (len(points) + 1) // 2
        for (x1, y1), (x2, y2) in zip(points, points[upper:], strict=False):
            if x2 > x1:
                slopes.append(((y2 - y1) / (x2 - x1), x2 - x1))
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in sorted(slopes):
        half -= weight
        if half <= 0:
            return max(0.0, slope)
    return 0.0


def _rising(points: Mapping[int, Sequence[float]]) -> Points:
    """By amount, the median of its values: noise must not make more work cheaper.

    Where it would, neighbours have their mean, by how many values each has (pool adjacent
    violators); none is below 0.
    """
    pools: list[tuple[float, int, list[int]]] = []  # (seconds, values, amounts)
    for amount, values in sorted(points.items()):
        seconds, count, amounts = median(values), len(values), [amount]
        while pools and pools[-1][0] > seconds:
            before, n, earlier = pools.pop()
            seconds = (before * n + seconds * count) / (n + count)
            count, amounts = n + count, earlier + amounts
        pools.append((seconds, count, amounts))
    return tuple((amount, max(0.0, s)) for s, _, amounts in pools for amount in amounts)


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
