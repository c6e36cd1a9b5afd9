"""The shapes of answers, for the OpenAPI document only: nothing is serialized through them.

Tests hold real answers against them, and no field may be missing or more than these say.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stopway_core.events import Mode
from stopway_core.types import Outcome, Reason, StopStatus

UnixTime = float


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="The field or parameter at fault.")
    code: str | None = Field(description="For programs; for an end, its reason.")


class ErrorAnswer(_Answer):
    """Every failure, in OpenAI's shape."""

    error: ErrorDetail


# --- completions ------------------------------------------------------------------------------


class PromptTokensDetails(_Answer):
    """What the prefix cache already had."""

    cached_tokens: int


class StopwayUsage(_Answer):
    """Beyond OpenAI's usage."""

    discarded_tokens: int = Field(description="Computed, and not delivered.")


class CompletionTokensDetails(_Answer):
    """Of the tokens that were guessed ahead: how many were right, and how many were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Answer):
    """``completion_tokens`` counts what was delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Only where tokens were guessed ahead."
    )
    stopway: StopwayUsage


class _ChoiceAnswer(_Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | None = Field(
        description="With abort: the reason of the stop. With stop: the stop string, if it was one."
    )
    logprobs: dict[str, Any] | None


class AssistantMessage(_Answer):
    """The text that was generated."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_ChoiceAnswer):
    """One of ``n``."""

    message: AssistantMessage


class CompletionChoice(_ChoiceAnswer):
    """One of ``n``."""

    text: str


class _GenerationAnswer(_Answer):
    id: str = Field(description="The request's id, also in the header x-request-id.")
    created: int
    model: str
    usage: Usage


class ChatAnswer(_GenerationAnswer):
    """A chat completion, whole."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(_GenerationAnswer):
    """A text completion, whole."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelAnswer(_Answer):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="Prompt and answer together; null: not known.")


class ModelList(_Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]


# --- requests and stops -----------------------------------------------------------------------


class RequestAnswer(_Answer):
    """A request, as its gateway sees it."""

    id: str
    object: Literal["request"]
    created: UnixTime
    ended: UnixTime | None
    status: Literal["waiting", "submitting", "queued", "running", "stopping", "finished"]
    outcome: Outcome | None
    reason: Reason | None = Field(description="Why it ended.")
    kind: Literal["chat", "completions"]
    model: str
    stream: bool
    n: int
    priority: int
    tenant: str
    conversation: str | None
    client_request_id: str | None = Field(description="The client's own x-request-id.")
    group: str | None
    epoch: int | None
    stop_ids: list[str] = Field(description="Of all stops that were aimed at it.")
    trace_id: str
    prompt_tokens: int
    completion_tokens: int


class RequestList(_Answer):
    """Requests of this gateway, live ones first, then newest first."""

    object: Literal["list"]
    data: list[RequestAnswer]


class RankAnswer(_Answer):
    """One rank's part in a stop; times are of that rank's clock."""

    rank: int
    stage: int
    node: str
    turn_noticed: int | None
    noticed_at: UnixTime | None
    stopped_at: UnixTime | None
    reclaimed_at: UnixTime | None


class GroupAnswer(_Answer):
    """One group's part in a stop."""

    group: str
    epoch: int | None
    turn_effective: int | None
    tokens_discarded: int
    blocks_reclaimed: int
    blocks_cached: int
    blocks_lent: int
    ranks: list[RankAnswer]


class StopAnswer(_Answer):
    """A stop, and what it did."""

    stop_id: str
    request_ids: list[str] = Field(description="At most 100.")
    count: int = Field(description="How many requests there are.")
    reason: Reason
    status: StopStatus = Field(description="Of several groups the least.")
    outcome: Outcome | dict[Outcome, int] | None = Field(
        description="What became of the request; counts, when there are many."
    )
    trace_id: str
    accepted_at: UnixTime | None = Field(
        description="When a gateway accepted it; null for a stop of another gateway."
    )
    pending_on: list[str] = Field(description="What still holds something.")
    groups: list[GroupAnswer]


# --- groups -----------------------------------------------------------------------------------


class BlocksAnswer(_Answer):
    """KV blocks; ``held`` by a holder other than the cache."""

    free: int
    held: int
    cached: int


class GroupState(_Answer):
    """A group, as its leader last told it."""

    group: str
    mode: Mode = Field(description="What it does with its requests.")
    epoch: int | None = Field(description="Null while it cannot serve.")
    running: int = Field(description="Sequences in the replicas.")
    waiting: int = Field(description="Sequences that wait at the leader.")
    blocks: BlocksAnswer


class GroupList(_Answer):
    """The groups that this gateway knows, by name."""

    groups: list[GroupState]


class ModeAnswer(_Answer):
    """What the groups were told, and who has not said yet that it is so."""

    mode: Mode
    pending_on: list[str]
    groups: list[GroupState]


# --- for operators ----------------------------------------------------------------------------


class HealthAnswer(_Answer):
    """The process lives."""

    status: Literal["ok"]


class ReadyAnswer(_Answer):
    """Whether requests can be served, and by which groups."""

    status: Literal["ready", "no group", "draining"]
    groups: list[str]


class LedgerAnswer(_Answer):
    """Each leader's ledger as that leader tells it, or its ``error``, with its ``group``."""

    groups: list[dict[str, Any]]


class TraceAnswer(_Answer):
    """Spans, by start."""

    trace_id: str
    spans: list[dict[str, Any]]
