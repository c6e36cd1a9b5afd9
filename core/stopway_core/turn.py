"""A turn: one entry of the leader's log, and how it travels.

Order inside a turn: results, compiled grammars, stops (and whatever else ends a request),
preemptions, cache to evict, grammars to forget and to compile, admissions, launch. Every rank
applies every turn, in number order, and nothing else changes a replica.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from stopway_core.types import SamplingParams
from stopway_core.wire import Frame, FrameKind, WireError, encode


class Sampled(NamedTuple):
    """A step's result: ``counts[i]`` of ``tokens`` for row i; no ``counts`` is one for each."""

    step: int
    tokens: list[int]
    counts: list[int]


@dataclass(slots=True)
class Compile:
    """A grammar is to be compiled into a slot by the rank that samples."""

    slot: int
    text: str


@dataclass(slots=True)
class Admit:
    """A request enters the replicas: all its known tokens, prompt first.

    ``grammar`` is the slot of its compiled grammar (0: none). With ``fork`` it takes over the KV
    of that running request as far as their prompts go: the same prompt, computed once.
    """

    rid: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    salt: str
    grammar: int = 0
    fork: int = 0


@dataclass(slots=True)
class StopEntry:
    """A stop takes effect in this turn on ``rids`` (which may be none)."""

    stop_id: str
    traceparent: str
    rids: list[int]


@dataclass(slots=True)
class Launch:
    """A step: one token for each of ``decode``, ``counts[i]`` tokens for ``prefill[i]``.

    ``drafts`` is empty, or has for each of ``decode`` the tokens that are guessed to follow; they
    are verified in the same step.
    """

    step: int
    decode: list[int]
    prefill: list[int]
    counts: list[int]
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows of the forward pass."""
        return len(self.decode) + sum(map(len, self.drafts)) + sum(self.counts)


@dataclass(slots=True)
class Turn:
    """What happened and what is to be done, in the order of the fields."""

    number: int
    results: list[Sampled] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)  # slots
    ends: list[int] = field(default_factory=list)  # rids
    stops: list[StopEntry] = field(default_factory=list)  # their rids are among ``ends``
    preempts: list[int] = field(default_factory=list)
    evicts: int = 0  # idle cached blocks that are let go of
    forgets: list[int] = field(default_factory=list)  # slots
    compiles: list[Compile] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    launch: Launch | None = None
    digest: int | None = None  # the leader's, after the turn before this one

    @property
    def empty(self) -> bool:
        """Whether applying it would change nothing."""
        return not (
            self.results
            or self.compiled
            or self.ends
            or self.stops
            or self.preempts
            or self.evicts
            or self.forgets
            or self.compiles
            or self.admits
            or self.launch
        )


def encode_turn(turn: Turn, epoch: int) -> bytes:
    """The frame of a turn; integers in arrays, the rest in the body."""
    body: dict[str, Any] = {}
    arrays: list[list[int]] = [turn.ends, turn.preempts]
    if turn.results:
        # [step] for a plain result, [step, 1] for one whose rows have several tokens.
        body["r"] = [[r.step, 1] if r.counts else [r.step] for r in turn.results]
        for result in turn.results:
            arrays.append(result.tokens)
            if result.counts:
                arrays.append(result.counts)
    if turn.stops:
        body["s"] = [[stop.stop_id, stop.traceparent] for stop in turn.stops]
        # Two arrays for all of them: a burst of stops must not exceed the arrays of a frame.
        arrays.append([len(stop.rids) for stop in turn.stops])
        arrays.append([rid for stop in turn.stops for rid in stop.rids])
    if turn.compiled or turn.forgets or turn.compiles:
        texts = [[compile.slot, compile.text] for compile in turn.compiles]
        body["g"] = [turn.compiled, turn.forgets, texts]
    if turn.evicts:
        body["e"] = turn.evicts
    if turn.admits:
        body["a"] = [
            [a.rid, a.prompt_len, _params_to_json(a.params), a.salt, a.grammar, a.fork]
            for a in turn.admits
        ]
        arrays.extend(a.tokens for a in turn.admits)
    if turn.launch is not None:
        launch = turn.launch
        body["l"] = [launch.step, 1] if launch.drafts else [launch.step]
        arrays.extend((launch.decode, launch.prefill, launch.counts))
        if launch.drafts:
            arrays.append([len(draft) for draft in launch.drafts])
            arrays.append([token for draft in launch.drafts for token in draft])
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

    def split() -> list[list[int]]:
        counts, values, at, parts = take(), take(), 0, []
        for count in counts:
            parts.append(values[at : at + count])
            at += count
        return parts

    turn = Turn(frame.turn, ends=take(), preempts=take(), evicts=body.get("e", 0))
    for step, *several in body.get("r", ()):
        turn.results.append(Sampled(step, take(), take() if several else []))
    if "s" in body:
        for (stop_id, traceparent), rids in zip(body["s"], split(), strict=True):
            turn.stops.append(StopEntry(stop_id, traceparent, rids))
    if "g" in body:
        turn.compiled, turn.forgets, texts = body["g"]
        turn.compiles = [Compile(slot, text) for slot, text in texts]
    for rid, prompt_len, params, salt, grammar, fork in body.get("a", ()):
        turn.admits.append(
            Admit(rid, take(), prompt_len, _params_from_json(params), salt, grammar, fork)
        )
    if "l" in body:
        step, *drafts = body["l"]
        turn.launch = Launch(step, take(), take(), take(), split() if drafts else [])
    turn.digest = body.get("d")
    return turn


_DEFAULTS = asdict(SamplingParams())


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    return {k: v for k, default in _DEFAULTS.items() if (v := getattr(params, k)) != default}


def _params_from_json(value: dict[str, Any]) -> SamplingParams:
    if "stop_token_ids" in value:
        value["stop_token_ids"] = tuple(value["stop_token_ids"])
    return SamplingParams(**value)
