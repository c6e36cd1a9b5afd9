"""What the front knows of each request that it has passed on to the leader."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stopway_core.types import Deadlines, SamplingParams, Submission
from stopway_engine.front.text import ChoiceText
from stopway_engine.grammar import spec
from stopway_engine.modelspec import ModelError
from stopway_engine.tokenizer import TextCodec

SEED_BITS = 62


class Rejected(Exception):
    """A request that cannot be passed on; becomes the ``refused`` message."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_prompt",
        param: str | None = "prompt",
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(slots=True)
class FrontRequest:
    """One request of one session; ``texts`` has an entry for each choice that has not ended."""

    uid: str
    session: Any
    logprobs: bool
    prompt_tokens: int
    texts: dict[int, ChoiceText] = field(default_factory=dict)
    accepted: bool = False


def epoch_of(message: Mapping[str, Any]) -> int:
    """The epoch that a submit was sent in. Raises ``KeyError`` or ``TypeError`` if it has none."""
    epoch = message["epoch"]
    if type(epoch) is not int:
        raise TypeError(f"epoch must be an integer, not {epoch!r}")
    return epoch


def check_grammar(text: str) -> None:
    """Refuse a grammar that cannot be used. May take seconds. Raises ``Rejected``."""
    try:
        spec.check(text)
    except spec.GrammarError as error:
        raise Rejected(str(error), code="invalid_grammar", param="response_format") from None
    except spec.CheckError as error:
        raise Rejected(str(error), status=503, code="grammar_check_failed", param=None) from None


def prompt_tokens(message: Mapping[str, Any], codec: TextCodec, limit: int) -> list[int]:
    """Token ids of a submit's prompt, at most ``limit`` of them. Raises ``Rejected``."""
    prompt = message["prompt"]
    check_size(prompt, codec, limit)
    if "tokens" in prompt:
        tokens = prompt["tokens"]
        if not all(isinstance(t, int) and 0 <= t < codec.vocab_size for t in tokens):
            raise Rejected(f"token ids must be integers from 0 to {codec.vocab_size - 1}")
        return list(tokens)
    if "text" in prompt:
        return codec.encode(prompt["text"], bos=True)
    try:
        return codec.chat(prompt["messages"])
    except ModelError as error:
        raise Rejected(str(error), code="no_chat_template", param="messages") from None
    except ValueError as error:
        raise Rejected(
            f"the model's chat template refuses these messages: {error}", param="messages"
        ) from None


def check_size(prompt: Mapping[str, Any], codec: TextCodec, limit: int) -> None:
    """Refuse what cannot fit whatever its tokens turn out to be, before they are looked for."""
    if "tokens" in prompt:
        if len(prompt["tokens"]) > limit:
            raise Rejected(
                f"the prompt has {len(prompt['tokens'])} tokens and the model's context is {limit}",
                code="context_length_exceeded",
            )
        return
    texts = [prompt["text"]] if "text" in prompt else [m["content"] for m in prompt["messages"]]
    size = sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))
    if size > limit * codec.piece_bytes_max:
        raise Rejected(
            f"the prompt has {size} bytes, more than {limit} tokens can be, and {limit} is the "
            "model's context",
            code="context_length_exceeded",
        )


def submission(
    message: Mapping[str, Any],
    tokens: list[int],
    gateway: str,
    max_model_len: int,
    deadlines: Deadlines,
) -> Submission:
    """The submission that a submit message makes, with its tokens and what its deadlines leave."""
    params = dict(message["params"])
    if params.get("max_tokens") is None:
        params["max_tokens"] = max(1, max_model_len - len(tokens))
    seed = params.get("seed")
    params["seed"] = secrets.randbits(SEED_BITS) if seed is None else seed % (1 << SEED_BITS)
    params["stop_token_ids"] = tuple(params.get("stop_token_ids") or ())
    known = SamplingParams.__dataclass_fields__
    return Submission(
        uid=message["uid"],
        attempt=message["attempt"],
        tenant=message["tenant"],
        prompt=tuple(tokens),
        params=SamplingParams(**{k: v for k, v in params.items() if k in known}),
        minted_at=message["minted_at"],
        choices=message["n"],
        priority=message.get("priority") or 0,
        grammar=message.get("grammar") or "",
        deadlines=deadlines,
        conversation=message.get("conversation") or "",
        salt=message.get("salt") or message["tenant"],
        traceparent=message.get("traceparent") or "",
        gateway=gateway,
    )
