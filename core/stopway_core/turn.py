"""A turn: one entry of the leader's log, and how it travels.

Order inside a turn: results, stops (and whatever else ends a request), preemptions, admissions,
launch. Every rank applies every turn, in number order, and nothing else changes a replica.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

from stopway_core.types import SamplingParams
from stopway_core.wire import Frame, FrameKind, WireError, encode


@dataclass(slots=True)
class Admit:
    """A request enters the replicas: all its known tokens, prompt first."""

    rid: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    salt: str


@dataclass(slots=True)
class StopEntry:
    """A stop takes effect in this turn on ``rids`` (which may be none)."""

    stop_id: str
    traceparent: str
    rids: list[int]


@dataclass(slots=True)
class Launch:
    """A step: one token for each of ``decode``, ``counts[i]`` tokens for ``prefill[i]``."""

    step: int
    decode: list[int]
    prefill: list[int]
    counts: list[int]


@dataclass(slots=True)
class Turn:
    """What happened and what is to be done, in the order of the fields."""

    number: int
    results: list[tuple[int, list[int]]] = field(default_factory=list)  # (step, tokens)
    ends: list[int] = field(default_factory=list)  # rids
    stops: list[StopEntry] = field(default_factory=list)  # their rids are among ``ends``
    preempts: list[int] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    launch: Launch | None = None
    digest: int | None = None  # the leader's, after the turn before this one

    @property
    def empty(self) -> bool:
        """Whether applying it would change nothing."""
        return not (
            self.results or self.ends or self.stops or self.preempts or self.admits or self.launch
        )


def encode_turn(turn: Turn, epoch: int) -> bytes:
    """The frame of a turn; integers in arrays, the rest in the body."""
    body: dict[str, Any] = {}
    arrays: list[list[int]] = [turn.ends, turn.preempts]
    if turn.results:
        body["r"] = [step for step, _ in turn.results]
        arrays.extend(tokens for _, tokens in turn.results)
    if turn.stops:
        body["s"] = [[stop.stop_id, stop.traceparent] for stop in turn.stops]
        # Two arrays for all of them: a burst of stops must not exceed the arrays of a frame.
        arrays.append([len(stop.rids) for stop in turn.stops])
        arrays.append([rid for stop in turn.stops for rid in stop.rids])
    if turn.admits:
        body["a"] = [[a.rid, a.prompt_len, _params_to_json(a.params), a.salt] for a in turn.admits]
        arrays.extend(a.tokens for a in turn.admits)
    if turn.launch is not None:
        body["l"] = turn.launch.step
        arrays.extend((turn.launch.decode, turn.launch.prefill, turn.launch.counts))
    if turn.digest is not None:
        body["d"] = turn.digest
    return encode(FrameKind.TURN, body, arrays, epoch=epoch, turn=turn.number)


def decode_turn(frame: Frame) -> Turn:
    """The turn in a frame. Raises ``WireError`` when it is not one."""
    if frame.kind is not FrameKind.TURN or not isinstance(frame.body, dict):
        raise WireError(f"frame of kind {frame.kind} is not a turn")
    try:
        return _decode(frame)
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise WireError(f"turn {frame.turn} cannot be read: {error!r}") from None


def _decode(frame: Frame) -> Turn:
    body, arrays = frame.body, iter(frame.arrays)

    def take() -> list[int]:
        values: array[int] = next(arrays)
        return values.tolist()

    turn = Turn(frame.turn, ends=take(), preempts=take())
    for step in body.get("r", ()):
        turn.results.append((step, take()))
    if "s" in body:
        counts, rids, at = take(), take(), 0
        for (stop_id, traceparent), count in zip(body["s"], counts, strict=True):
            turn.stops.append(StopEntry(stop_id, traceparent, rids[at : at + count]))
            at += count
    for rid, prompt_len, params, salt in body.get("a", ()):
        turn.admits.append(Admit(rid, take(), prompt_len, _params_from_json(params), salt))
    if "l" in body:
        turn.launch = Launch(body["l"], take(), take(), take())
    turn.digest = body.get("d")
    return turn


_DEFAULTS = asdict(SamplingParams())


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    return {k: v for k, default in _DEFAULTS.items() if (v := getattr(params, k)) != default}


def _params_from_json(value: dict[str, Any]) -> SamplingParams:
    if "stop_token_ids" in value:
        value["stop_token_ids"] = tuple(value["stop_token_ids"])
    return SamplingParams(**value)
