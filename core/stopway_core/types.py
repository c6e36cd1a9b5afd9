"""The nouns: sampling parameters, requests, stops, and the work of one step.

Times are Unix seconds (``float``) and always come from outside. Token ids, block ids, ranks,
turns and steps are plain integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stopway_core import names


class Reason(StrEnum):
    """Why a request ended. Closed: every end of every request has exactly one of these."""

    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    GRAMMAR_END = "grammar_end"
    CLIENT_CANCEL = "client_cancel"
    CLIENT_DISCONNECT = "client_disconnect"
    ADMIN = "admin"
    DEADLINE_QUEUE = "deadline_queue"
    DEADLINE_TTFT = "deadline_ttft"
    DEADLINE_TOTAL = "deadline_total"
    PREEMPTED = "preempted"
    BAD_INPUT = "bad_input"
    TRANSFER_FAILED = "transfer_failed"
    RANK_LOST = "rank_lost"
    DRAIN = "drain"
    ENGINE_ERROR = "engine_error"


class Outcome(StrEnum):
    """How a request ended; the first one wins and there is exactly one."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


_FINISHED = frozenset({Reason.EOS, Reason.LENGTH, Reason.STOP_STRING, Reason.GRAMMAR_END})
_FAILED = frozenset(
    {Reason.BAD_INPUT, Reason.TRANSFER_FAILED, Reason.RANK_LOST, Reason.ENGINE_ERROR}
)


def outcome_of(reason: Reason) -> Outcome:
    """The outcome that a reason implies (total: every reason has one)."""
    if reason in _FINISHED:
        return Outcome.FINISHED
    if reason in _FAILED:
        return Outcome.FAILED
    return Outcome.STOPPED


def finish_reason_of(reason: Reason) -> str:
    """OpenAI's ``finish_reason`` for a request that ended for ``reason``."""
    if reason is Reason.LENGTH:
        return "length"
    return "stop" if reason in _FINISHED else "abort"


class StopStatus(StrEnum):
    """How far a stop has come. ``ALREADY_FINISHED`` is terminal, as is ``RECLAIMED``."""

    ACCEPTED = "accepted"
    NOTICED = "noticed"
    STOPPED = "stopped"
    RECLAIMED = "reclaimed"
    ALREADY_FINISHED = "already_finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated at the gateway; ranks trust it.

    ``temperature`` 0 is greedy. ``top_k`` 0 is off, ``top_p`` 1 is off, ``min_p`` 0 is off.
    ``seed`` makes a sampled request repeatable: a draw depends on (logits, params, seed,
    position) and on nothing else. ``logprobs`` is -1 for none, else the number of alternatives
    returned with each token (0: the chosen token's own only).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    @property
    def penalized(self) -> bool:
        """Whether the draw depends on the tokens seen so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after arrival at the leader; ``None`` is no deadline."""

    queue: float | None = None
    first_token: float | None = None
    total: float | None = None


DEADLINE_REASONS = {
    "queue": Reason.DEADLINE_QUEUE,
    "first_token": Reason.DEADLINE_TTFT,
    "total": Reason.DEADLINE_TOTAL,
}
"""Why a request ends that has missed each of the ``Deadlines``."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a stop is aimed at: exactly one of these is set.

    Selectors travel unexpanded; the leader resolves them at one turn.
    """

    uids: tuple[str, ...] = ()
    conversation: str = ""
    tenant: str = ""
    everything: bool = False

    def selects(self, tenant: str, conversation: str) -> bool:
        """Whether a selector means a request of this tenant, in this conversation ("": none)."""
        if self.conversation:
            return self.conversation == conversation
        return self.everything or bool(self.tenant and self.tenant == tenant)


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop. True until resolved: it may come many times, in any order, before its request."""

    stop_id: str
    target: Target
    reason: Reason
    tenant: str  # who asks; only an admin reaches beyond it
    admin: bool
    issued_at: float
    traceparent: str = ""
    publisher: str = ""
    sequence: int = 0  # of the publisher, so that a gap in the stream is seen

    def reaches(self, tenant: str) -> bool:
        """Whether it may stop what is ``tenant``'s."""
        return self.admin or self.tenant == tenant


SELECTOR_SKEW_S = 2.0  # by which the clocks of two gateways may differ


def covers(stop: Stop, uid: str, minted_at: float) -> bool:
    """Whether a stop can mean a request by when it was minted: a name means it whenever.

    A selector means what is there when it is issued; kept, late or sent again, it must not find
    others. By one gateway's clock that is exact.
    """
    if stop.target.uids:
        return True
    one_clock = names.uid_gateway(uid) == names.publisher_gateway(stop.publisher) != ""
    return minted_at <= stop.issued_at + (0.0 if one_clock else SELECTOR_SKEW_S)


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it reaches a leader: tokenized, validated, not yet scheduled.

    ``choices`` > 1 makes that many children, uid ``{uid}.{index}``, admitted or refused together.
    ``salt`` separates the prefix cache of one tenant from another's. A smaller ``priority`` goes
    first. ``grammar`` is what the output must match, as the JSON that a compiler reads (empty:
    anything); equal texts share one compiled grammar.
    """

    uid: str
    attempt: int
    tenant: str
    prompt: tuple[int, ...]
    params: SamplingParams
    minted_at: float
    choices: int = 1
    priority: int = 0
    grammar: str = ""
    deadlines: Deadlines = Deadlines()
    conversation: str = ""
    salt: str = ""
    traceparent: str = ""
    gateway: str = ""


class Pulse:
    """Whether a request still lives: written by the control thread, read by the exec thread."""

    __slots__ = ("beats",)

    def __init__(self) -> None:
        self.beats = True


NO_SOURCE = (0, 0)

REJECTED = -1
"""In a result, in place of a token: the grammar allows none here."""

DROPPED = -2
"""In a result, in place of a token: the row left its step, since its request had ended."""


@dataclass(slots=True)
class RowWork:
    """One request's part of one step: the exec thread reads it, only the replica makes it.

    The ``tokens`` fed stand at positions ``start .. start + len(tokens) - 1``; a token is sampled
    after each of the last ``samples`` of them. With more than one sample all but the first of
    those are drafts: the result keeps the samples up to the first that its draft differs from.
    A row with a ``source`` feeds one token, which the sampler has and nobody else yet: sample
    number ``source[1]`` of step ``source[0]``.

    ``blocks`` is the request's block table and ``history`` all its known tokens: both are
    append-only lists shared with the replica, which leaves them alone after a stop, so reading a
    prefix of them is safe from another thread. The tokens before the one at ``start + i`` are
    ``history[:start] + tokens[:i]``. ``grammar`` is the slot of the compiled one, 0 for none.
    """

    rid: int
    start: int
    tokens: list[int]
    blocks: list[int]
    samples: int
    params: SamplingParams
    history: list[int]
    prompt_len: int
    source: tuple[int, int] = NO_SOURCE
    grammar: int = 0
    pulse: Pulse = field(default_factory=Pulse)


@dataclass(slots=True)
class StepWork:
    """A step as the exec thread runs it. Rows keep their order in the result.

    ``copies`` are (from, to) blocks to be copied before anything is computed. ``left`` are
    requests with a grammar that have ended since the step before.
    """

    step: int
    rows: list[RowWork]
    copies: list[tuple[int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Logprobs:
    """The chosen token's log probability and the best alternatives, as (token id, logprob)."""

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)

    def to_json(self) -> list[object]:
        """As frames carry it: the log probability, then the alternatives."""
        return [self.logprob, self.top]


@dataclass(slots=True)
class StepResult:
    """What the sampling rank found for the rows with samples, in their order.

    ``counts[i]`` tokens for row i; empty ``counts`` is one for each. A row has at least one entry,
    which may be ``REJECTED`` or ``DROPPED``. ``logprobs`` is empty, or parallel to ``tokens`` with
    ``None`` where none were asked for.
    """

    step: int
    tokens: list[int]
    logprobs: list[Logprobs | None] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
