"""From a validated body to what travels to a leader."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from stopway_gateway.config import Settings
from stopway_gateway.errors import ApiError
from stopway_gateway.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    SamplingBody,
    invalid,
    stop_strings,
    validate_sampling,
)
from stopway_gateway.structured import grammar_of

COMPLETION_TOKENS = 16  # OpenAI's default for text completions
_GUESSED_TOKENS = 256  # for routing, when the client sets no maximum


@dataclass(frozen=True, slots=True)
class Generation:
    """What a client asked for. ``cost`` estimates its tokens, for routing only."""

    kind: str  # "chat" or "completions"
    model: str
    stream: bool
    include_usage: bool
    n: int
    prompt: dict[str, Any]
    params: dict[str, Any]
    stop: list[str]
    include_stop: bool
    deadlines: dict[str, float | None]
    conversation: str
    cost: int
    priority: int
    grammar: str  # what the answer must match; empty: anything
    grammar_field: str  # where the client said so


def parse_chat(raw: dict[str, Any], settings: Settings) -> Generation:
    """The generation that a chat body asks for. Raises a 400."""
    if isinstance(raw.get("messages"), list):
        for message in raw["messages"]:
            if isinstance(message, dict) and (
                message.get("tool_calls") or message.get("role") in ("tool", "function")
            ):
                raise ApiError(
                    400, "Tools are not supported.", code="unsupported_parameter", param="messages"
                )
    body = validate_sampling(ChatBody, raw, settings)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "only with logprobs: true")
    messages = [{"role": _role(m), "content": _content(m)} for m in body.messages]
    chars = sum(len(m["content"]) for m in messages)
    return _generation(
        "chat",
        body,
        {"messages": messages},
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        prompt_cost=chars // 4,
        settings=settings,
    )


def parse_completion(raw: dict[str, Any], settings: Settings) -> Generation:
    """The generation that a text completion's body asks for. Raises a 400."""
    body = validate_sampling(CompletionBody, raw, settings)
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ApiError(
                400,
                "prompt: one prompt per request; send several requests instead of a list",
                code="unsupported_parameter",
                param="prompt",
            )
        prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "prompt: must not be empty", code="invalid_value", param="prompt")
    text = isinstance(prompt, str)
    return _generation(
        "completions",
        body,
        {"text": prompt} if text else {"tokens": prompt},
        max_tokens=body.max_tokens or COMPLETION_TOKENS,
        logprobs=-1 if body.logprobs is None else body.logprobs,
        prompt_cost=len(prompt) // 4 if text else len(prompt),
        settings=settings,
    )


def _generation(
    kind: str,
    body: SamplingBody,
    prompt: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int,
    prompt_cost: int,
    settings: Settings,
) -> Generation:
    n = body.n or 1
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", "must be at most max_tokens")
    grammar, grammar_field = grammar_of(body, settings.grammar_bytes_max)
    deadlines = body.deadlines.model_dump() if body.deadlines else {}
    return Generation(
        kind=kind,
        model=body.model,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        n=n,
        prompt=prompt,
        params=_params(body, max_tokens, logprobs),
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        deadlines={name: deadlines.get(name) for name in ("queue", "first_token", "total")},
        conversation=(body.metadata or {}).get("conversation_id", ""),
        cost=prompt_cost + n * (max_tokens or _GUESSED_TOKENS),
        priority=body.priority or 0,
        grammar=grammar,
        grammar_field=grammar_field,
    )


def _params(body: SamplingBody, max_tokens: int | None, logprobs: int) -> dict[str, Any]:
    def default(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    # Without a seed, each request draws its own: equal requests then differ, as people expect.
    seed = secrets.randbits(31) if body.seed is None else body.seed & (2**63 - 1)
    return {
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens or 0,
        "temperature": float(default(body.temperature, 1.0)),
        "top_p": float(default(body.top_p, 1.0)),
        "top_k": max(0, body.top_k or 0),
        "min_p": float(default(body.min_p, 0.0)),
        "presence_penalty": float(default(body.presence_penalty, 0.0)),
        "frequency_penalty": float(default(body.frequency_penalty, 0.0)),
        "repetition_penalty": float(default(body.repetition_penalty, 1.0)),
        "seed": seed,
        "logprobs": logprobs,
        "ignore_eos": bool(body.ignore_eos),
        "stop_token_ids": list(dict.fromkeys(body.stop_token_ids or [])),
    }


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _content(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content)
    return message.content or ""


def tenant_salt(secret: str, tenant: str) -> str:
    """What separates one tenant's prefix cache from another's; the same at every gateway."""
    return hmac.new(secret.encode(), b"salt:" + tenant.encode(), hashlib.sha256).hexdigest()[:32]
