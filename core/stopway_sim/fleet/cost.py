"""What things cost in a simulated group, as one value that travels as JSON."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import COUNT_MAX, SECONDS_MAX, finite, is_duration

SHAPE_MAX = 1024  # each step has a list of its stages
Points = tuple[tuple[int, float], ...]
"""(amount, seconds): a piecewise linear curve; beyond the last point its last slope goes on."""


def curve(points: Points, amount: int) -> float:
    """Seconds for ``amount``, linearly between points; 0 for 0 when there is no point before."""
    if amount <= 0:
        return 0.0
    at = bisect_right(points, (amount, float("inf")))
    if at == len(points):
        at -= 1
    x1, y1 = points[at]
    x0, y0 = points[at - 1] if at else (0, 0.0)
    return y0 + (y1 - y0) * (amount - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class CostModel:
    """One group: its shape, its limits, and seconds for whatever takes time.

    A step of ``d`` decoding rows and ``p`` prefill tokens takes ``base_s + decode(d) +
    prefill(p) + context_token_s * c + prefill_pair_s * q`` seconds over all its layers; a pipeline
    splits that evenly over its stages. ``c`` is the context of the decoding rows, in tokens of all
    of them together: their KV is read. ``q`` is, summed over the prefill's chunks, a chunk's tokens
    times those before it, cached or computed: their attention. What the tokens of a chunk are to
    each other is in ``prefill``.

    The default is of the order of an 8B model with grouped queries on one current accelerator: a
    token's KV is 128 KiB, at 3.3 TB/s; a pair is 0.5 MFLOP, at 350 TFLOP/s. ``calibrate`` makes a
    model from measurements.
    """

    # Shape.
    tensor: int = 1
    pipeline: int = 1
    layers: int = 32
    # Steps.
    base_s: float = 0.008
    decode: Points = ((64, 0.002), (256, 0.012))
    prefill: Points = ((512, 0.012), (8192, 0.24))
    context_token_s: float = 4e-8  # for each token of a decoding row's context
    prefill_pair_s: float = 1.5e-9  # for each pair of a chunk's token and one before the chunk
    turn_s: float = 0.0003  # from a result, or a request, to the launch that answers it
    hop_s: float = 0.0001  # hidden states to the next stage
    # Messages, one way.
    control_s: float = 0.0001  # leader to follower, and a result back to the leader
    gateway_s: float = 0.0005  # gateway to leader, and back
    redis_s: float = 0.001  # a stop from a gateway by way of Redis to the leader
    resend_s: float = 0.2  # after which a stop goes past Redis
    detokenize_s: float = 0.0002
    # The front's intake, one submission at a time.
    intake_s: float = 0.0002
    intake_token_s: float = 0.0000005
    # Prefill to decode.
    transfer_s: float = 0.002
    transfer_token_s: float = 0.00001
    # Limits, as the planner has them.
    blocks: int = 8192
    block_size: int = 16
    window: int = 2
    max_batch_tokens: int = 2048
    max_running: int = 256
    max_waiting: int = 16_384
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                _check_points(field.name, value)
            elif field.name.endswith("_s"):
                if not is_duration(value):
                    raise FleetError(
                        f"cost: {field.name} is {value}; give seconds, 0 to {SECONDS_MAX:g}"
                    )
            else:
                most = SHAPE_MAX if field.name in ("tensor", "pipeline", "layers") else COUNT_MAX
                if not 1 <= value <= most:
                    raise FleetError(f"cost: {field.name} is {value}; give 1 to {most}")
        if self.base_s + self.decode[0][1] <= 0:
            raise FleetError("cost: a step takes no time; give base_s or decode more than 0")

    @property
    def ranks(self) -> int:
        """Processes of one group."""
        return self.tensor * self.pipeline

    def step_s(
        self,
        decode_rows: int,
        prefill_tokens: int,
        context_tokens: int = 0,
        prefill_pairs: int = 0,
    ) -> float:
        """Seconds of a step over all its layers; ``context_tokens`` are the decoding rows'."""
        rows, tokens = curve(self.decode, decode_rows), curve(self.prefill, prefill_tokens)
        attention = self.context_token_s * context_tokens + self.prefill_pair_s * prefill_pairs
        return self.base_s + rows + tokens + attention

    def to_json(self) -> dict[str, Any]:
        """Every field; curves as lists of pairs."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, otherwise: CostModel | None = None) -> CostModel:
        """The model in a JSON object; what it leaves out is as in ``otherwise``, or by default.

        Raises ``FleetError`` for an unknown name, a wrong type or an impossible value.
        """
        if not isinstance(value, dict):
            raise FleetError("cost: the document must be a JSON object of the model's fields")
        known = {field.name: field.type for field in fields(cls)}
        found: dict[str, Any] = {}
        for name, given in value.items():
            kind = known.get(name)
            if kind is None:
                raise FleetError(f"cost: unknown field {name!r}; known are {', '.join(known)}")
            found[name] = _field(name, str(kind), given)
        return replace(otherwise or cls(), **found)

    @classmethod
    def loads(cls, text: str, otherwise: CostModel | None = None) -> CostModel:
        """``from_json`` of a document's text."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FleetError(f"cost: not JSON: {error}") from None
        return cls.from_json(value, otherwise)


def _field(name: str, kind: str, given: Any) -> Any:
    if kind == "Points":
        try:
            return tuple((_number(name, x, whole=True), _number(name, y)) for x, y in given)
        except FleetError:
            raise
        except (TypeError, ValueError):
            raise FleetError(f"cost: {name} must be a list of [amount, seconds] pairs") from None
    return _number(name, given, whole=kind == "int")


def _number(name: str, given: Any, *, whole: bool = False) -> Any:
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    value = finite(f"cost: {name}", given) if number else 0.0
    if not number or (whole and not value.is_integer()):
        raise FleetError(f"cost: {name} is {given!r}; give a {'whole ' if whole else ''}number")
    return int(given) if whole else value


def _check_points(name: str, points: Points) -> None:
    if not points:
        raise FleetError(f"cost: {name} has no points")
    before = (0, 0.0)
    for amount, seconds in points:
        if not before[0] < amount <= COUNT_MAX or not before[1] <= seconds <= SECONDS_MAX:
            raise FleetError(
                f"cost: {name} must rise from point to point (amounts strictly, to {COUNT_MAX}), "
                f"and [{amount}, {seconds}] follows [{before[0]}, {before[1]}]"
            )
        before = (amount, seconds)
