"""From measurements to a cost model, and the model beside the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any, NamedTuple

from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_sim.fleet.config import FleetConfig
from stopway_sim.fleet.cost import CostModel, Points, curve
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import COUNT_MAX, is_duration
from stopway_sim.fleet.run import simulate
from stopway_sim.fleet.workload import Spec, Workload

PAIRS_MIN = 4  # of alike steps, of equal weight: then no step decides alone what a slope is


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
    nothing else matters (``_slope``); 0 where there are too few, and where it would explain all
    that a step takes. Without that, the median of equal steps counts, and of prefills of similar
    size (up to twice each other), whose small differences would make for wild slopes. Of two values
    the lesser counts: what disturbs a step makes it slower. Curves rise (``_rising``).
    """
    steps = _steps(measured.get("step_times"))
    alone = [step for step in steps if step.decode and not step.prefill]
    chunks = [step for step in steps if step.prefill]
    if len({step.decode for step in alone}) < 2 or not chunks:
        raise FleetError(
            "step_times: measure steps of at least two numbers of decoding rows without prefill, "
            "and at least one with prefill tokens"
        )
    context_s, base, decode = _decoding(alone)
    pair_s, prefill = _prefilling(
        chunks,
        [
            step.seconds - base - curve(decode, step.decode) - context_s * step.context
            for step in chunks
        ],
    )
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
    return CostModel.from_json({**cost, **found}, otherwise)


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


def _decoding(alone: Sequence[_Step]) -> tuple[float, float, Points]:
    """Seconds for a token of context, the base, and the curve of rows, of decoding steps.

    The base is where the line through the curve's first two points begins.
    """
    context_s = _slope([(step.decode, step.context, step.seconds) for step in alone])
    points = _by_rows(alone, context_s)
    if not points[0][1]:
        context_s, points = 0.0, _by_rows(alone, 0.0)
    (x1, y1), (x2, y2) = points[:2]
    base = max(0.0, y1 - (y2 - y1) / (x2 - x1) * x1)
    return context_s, base, tuple((rows, s - base) for rows, s in points)


def _by_rows(alone: Sequence[_Step], context_s: float) -> Points:
    """What decoding steps take without their context, by their rows."""
    rows: dict[int, list[float]] = {}
    for step in alone:
        rows.setdefault(step.decode, []).append(step.seconds - context_s * step.context)
    return _rising(rows)


def _prefilling(chunks: Sequence[_Step], own: Sequence[float]) -> tuple[float, Points]:
    """Seconds for a pair, and the curve of tokens; ``own`` is what a chunk took of its step."""
    pair_s = _slope([(step.prefill, step.pairs, s) for step, s in zip(chunks, own, strict=True)])
    points = _by_size(chunks, own, pair_s)
    if not points[-1][1]:
        pair_s, points = 0.0, _by_size(chunks, own, 0.0)
    if not points[-1][1]:
        raise FleetError(
            "step_times: steps with prefill tokens take no longer than steps without; measure more "
            "of both, and prefills of several sizes alone"
        )
    return pair_s, points


def _by_size(chunks: Sequence[_Step], own: Sequence[float], pair_s: float) -> Points:
    """What chunks take without the tokens before them, by their own tokens."""
    similar: dict[int, list[tuple[int, float]]] = {}
    for step, s in zip(chunks, own, strict=True):
        found = similar.setdefault(step.prefill.bit_length(), [])
        found.append((step.prefill, s - pair_s * step.pairs))
    return _rising(
        {median_low(size for size, _ in found): [s for _, s in found] for found in similar.values()}
    )


def _slope(steps: Sequence[tuple[int, int, float]]) -> float:
    """How much a value rises with x, of (group, x, value); never below 0, and 0 of too few.

    Theil's incomplete method in each group of alike steps whose greatest x is at least twice its
    least: by x, each of the lower half with its counterpart in the upper one; of all these slopes
    the median, weighted by the distances in x (Jaeckel). So it stands up to steps that something
    else made slow, up to a quarter of all, and near points count for little. A group counts when
    its pairs weigh as much as ``PAIRS_MIN`` of its heaviest.
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
        found = [
            ((y2 - y1) / (x2 - x1), x2 - x1)
            for (x1, y1), (x2, y2) in zip(points, points[upper:], strict=False)
            if x2 > x1
        ]
        weights = [weight for _, weight in found]
        if sum(weights) >= PAIRS_MIN * max(weights, default=1):
            slopes += found
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in sorted(slopes):
        half -= weight
        if half <= 0:
            return max(0.0, slope)
    return 0.0


def _rising(points: Mapping[int, Sequence[float]]) -> Points:
    """By amount, the (lower) median of its values: noise must not make more work cheaper.

    Where it would, neighbours have their mean, by how many values each has (pool adjacent
    violators); none is below 0.
    """
    pools: list[tuple[float, int, list[int]]] = []  # (seconds, values, amounts)
    for amount, values in sorted(points.items()):
        seconds, count, amounts = median_low(values), len(values), [amount]
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
