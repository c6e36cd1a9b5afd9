"""The bodies that clients send, validated.

Strict: a number is a number. Fields of OpenAI's that change nothing here are accepted and ignored;
those that would change what the answer means are refused (``unsupported``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from stopway_core import names
from stopway_gateway.config import Settings
from stopway_gateway.errors import ApiError

_TOKENS_MAX = 10_000_000
WAIT_S = 10.0
WAIT_TEXT = "How far to wait for the stop before answering."
WAIT_TIMEOUT_TEXT = "For how many seconds to wait (at most 60, unless set otherwise)."
MODE_TIMEOUT_TEXT = (
    "For how many seconds to wait for the groups (at most 60, unless set otherwise)."
)
WaitLevel = Literal["accepted", "stopped", "reclaimed"]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(gt=0, le=86_400.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """``stream_options``."""

    include_usage: bool = Field(False, description="A chunk with the usage before `[DONE]`.")


class DeadlinesBody(_Strict):
    """Seconds; absent is none."""

    queue: Seconds | None = Field(None, description="Until it is scheduled.")
    first_token: Seconds | None = Field(None, description="Until the first token.")
    total: Seconds | None = Field(None, description="Until its end.")


def _only_true(value: Any) -> Any:
    """``Literal[True]`` takes 1 as well; for one field that stops everything."""
    if value is not None and value is not True:
        raise ValueError("true, or leave it out")
    return value


OnlyTrue = Annotated[Literal[True] | None, BeforeValidator(_only_true)]


class JsonSchemaFormat(_Strict):
    """``response_format.json_schema``; ``strict`` changes nothing, for it always is."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """``response_format``, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Strict):
    """``structured_outputs``, as vLLM has it: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(
        None, alias="json", description="A JSON schema, or the text of one."
    )
    json_object: OnlyTrue = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1, description="A grammar in Lark's syntax.")


class TextPart(_Strict):
    """The one kind of content part there is."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None


class SamplingBody(_Strict):
    """What chat and text completions share."""

    model: str = Field(min_length=1, max_length=256)
    n: int | None = Field(None, ge=1, description="Choices (at most 16, unless set otherwise).")
    stream: bool | None = Field(None, description="Whether the answer is a stream of events.")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        None, ge=1, le=_TOKENS_MAX, description="Default: 16 for texts; for chats as many as fit."
    )
    min_tokens: int | None = Field(None, ge=0, le=_TOKENS_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: all.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Default: another one for each request."
    )
    stop: str | list[str] | None = Field(
        None, description="At most 16 strings of 1 to 256 characters, unless set otherwise."
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = Field(None, description="Go on past the end of the text.")
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = Field(
        None, description="What the answer must be. Not together with `structured_outputs`."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the answer must match."
    )
    priority: int | None = Field(
        None, ge=-100, le=100, description="Smaller goes first; below 0 for admins only."
    )
    deadlines: DeadlinesBody | None = Field(None, description="The request is stopped at these.")
    metadata: dict[str, str] | None = Field(
        None, description="`conversation_id` names the conversation: for its cache, and to stop it."
    )


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_TOKENS_MAX, description="Goes before `max_tokens`."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] = Field(
        description="A text, or token ids; a list of prompts has one."
    )
    logprobs: int | None = Field(None, ge=0, le=20)


class StopBody(_Strict):
    """``POST /v1/stops``: exactly one of the first four, and how to stop."""

    request_ids: list[Id] | None = Field(
        None, min_length=1, description="At most 1,000, unless set otherwise."
    )
    conversation: str | None = Field(None, min_length=1, max_length=names.ID_MAX)
    tenant: Id | None = None
    all: OnlyTrue = None
    wait: WaitLevel = Field("accepted", description=WAIT_TEXT)
    timeout: float = Field(WAIT_S, ge=0, description=WAIT_TIMEOUT_TEXT)
    reason: Literal["client_cancel", "admin", "drain"] | None = Field(
        None,
        description="Admins only. Default: admin for all or a tenant, by an admin; "
        "else client_cancel.",
    )


class GroupsBody(_Strict):
    """``POST /v1/groups/resume`` and ``/drain``; all of it may be left out."""

    groups: list[Annotated[str, Field(min_length=1, max_length=names.ID_MAX)]] | None = Field(
        None, min_length=1, max_length=1000, description="Their names; left out: all of them."
    )
    timeout: float = Field(WAIT_S, ge=0, description=MODE_TIMEOUT_TEXT)


class PauseBody(GroupsBody):
    """``POST /v1/groups/pause``."""

    mode: Literal["abort", "wait", "keep"] = Field(
        description="What becomes of the requests that the groups have: `abort` ends them, `wait` "
        "lets those in the replicas run to their end, `keep` stops them where they are."
    )


BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, StopBody, GroupsBody, PauseBody)
Body = TypeVar("Body", bound=BaseModel)
Sampling = TypeVar("Sampling", bound=SamplingBody)

# A value that leaves the meaning alone, by field; any other is refused.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "background": (False,),
}


def validate(model: type[Body], raw: dict[str, Any]) -> Body:
    """``raw`` as ``model``. Raises a 400 that names the field and says what it must be."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise invalid(".".join(str(part) for part in first["loc"])[:100], first["msg"]) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deep.", code="invalid_json") from None


def invalid(param: str, message: str) -> ApiError:
    """The 400 for a value that is not one of those that ``param`` can have."""
    return ApiError(400, f"{param}: {message}", code="invalid_value", param=param)


def validate_sampling(model: type[Sampling], raw: dict[str, Any], settings: Settings) -> Sampling:
    """``raw`` as ``model``, within the limits that are set. Raises a 400."""
    for name, harmless in _HARMLESS.items():
        value = raw.get(name)
        if value is not None and not any(value is h or value == h for h in harmless):
            raise ApiError(
                400, f"{name} is not supported.", code="unsupported_parameter", param=name
            )
    body = validate(model, raw)
    _check_limits(body, settings)
    return body


def _check_limits(body: SamplingBody, settings: Settings) -> None:
    if body.n is not None and body.n > settings.choices_max:
        raise invalid("n", f"must be at most {settings.choices_max}")
    stops = stop_strings(body)
    if len(stops) > settings.stop_strings_max:
        raise invalid("stop", f"at most {settings.stop_strings_max} strings")
    if any(not 0 < len(text) <= settings.stop_string_chars_max for text in stops):
        raise invalid("stop", f"each string has 1 to {settings.stop_string_chars_max} characters")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only with stream: true")
    metadata = body.metadata or {}
    if len(metadata) > settings.metadata_keys_max or any(
        len(k) > 64 or len(v) > settings.metadata_chars_max for k, v in metadata.items()
    ):
        raise invalid(
            "metadata",
            f"at most {settings.metadata_keys_max} keys of 64 characters, with values of "
            f"{settings.metadata_chars_max}",
        )
    conversation = metadata.get("conversation_id")
    if conversation is not None and not 0 < len(conversation) <= names.ID_MAX:
        raise invalid("metadata.conversation_id", f"has 1 to {names.ID_MAX} characters")


def stop_strings(body: SamplingBody) -> list[str]:
    """``stop`` as a list."""
    if body.stop is None:
        return []
    return [body.stop] if isinstance(body.stop, str) else body.stop
