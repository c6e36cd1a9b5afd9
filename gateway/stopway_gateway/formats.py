"""OpenAI's objects: chunks and whole answers, for chat and for text completions."""

from __future__ import annotations

from typing import Any

from stopway_core.types import Outcome
from stopway_gateway.request import Choice, End, Item, Request

Logprobs = list[dict[str, Any]]


def stop_reason(end: End) -> str | None:
    """Our reason for an ``abort``; the string that ended it for a ``stop``."""
    return str(end.reason) if end.outcome is not Outcome.FINISHED else end.stop_string


class Format:
    """One API's shapes."""

    chunk_object: str
    answer_object: str

    def _choice(self, choice: Choice, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        raise NotImplementedError

    def _whole(self, choice: Choice, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        raise NotImplementedError

    def _last(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def head(self, request: Request, choice: Choice) -> dict[str, Any] | None:
        """What goes before a choice's first text, if anything does."""
        return None

    def piece(self, request: Request, choice: Choice, item: Item) -> dict[str, Any]:
        """A chunk of text."""
        fields = self._choice(choice, item.text, item.logprobs)
        choice.chars += len(item.text)
        return self._chunk(request, [{**fields, "finish_reason": None}])

    def last(self, request: Request, choice: Choice, end: End) -> dict[str, Any]:
        """The one chunk of a choice that has a ``finish_reason``."""
        fields = self._last(choice)
        ending = {"finish_reason": end.finish_reason, "stop_reason": stop_reason(end)}
        return self._chunk(request, [{**fields, **ending}])

    def usage(self, request: Request) -> dict[str, Any]:
        """The chunk that ``stream_options.include_usage`` asks for."""
        return {**self._chunk(request, []), "usage": request.usage()}

    def answer(self, request: Request) -> dict[str, Any]:
        """The whole answer, not streamed."""
        choices = []
        for choice in request.choices:
            end = choice.closed
            assert end is not None
            text = "".join(item.text for item in choice.kept) + end.text
            found = [entry for item in choice.kept for entry in item.logprobs or ()]
            wanted = request.generation.params["logprobs"] >= 0
            fields = self._whole(choice, text, found if wanted else None)
            ending = {"finish_reason": end.finish_reason, "stop_reason": stop_reason(end)}
            choices.append({**fields, **ending})
        return {
            **self._base(request, self.answer_object),
            "choices": choices,
            "usage": request.usage(),
        }

    def _chunk(self, request: Request, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._base(request, self.chunk_object), "choices": choices}
        if request.generation.include_usage:
            chunk["usage"] = None
        return chunk

    @staticmethod
    def _base(request: Request, kind: str) -> dict[str, Any]:
        return {
            "id": request.uid,
            "object": kind,
            "created": int(request.created),
            "model": request.generation.model,
        }


class ChatFormat(Format):
    """``chat.completion`` and its chunks."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def head(self, request: Request, choice: Choice) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(request, [fields])

    def _choice(self, choice: Choice, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        shown = _chat_logprobs(logprobs) if logprobs else None
        return {"index": choice.index, "delta": {"content": text}, "logprobs": shown}

    def _whole(self, choice: Choice, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if logprobs is None else _chat_logprobs(logprobs),
        }

    def _last(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "logprobs": None}


class CompletionFormat(Format):
    """``text_completion``, whole and in chunks."""

    chunk_object = "text_completion"
    answer_object = "text_completion"

    def _choice(self, choice: Choice, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        shown = _completion_logprobs(logprobs, choice.chars) if logprobs else None
        return {"index": choice.index, "text": text, "logprobs": shown}

    def _whole(self, choice: Choice, text: str, logprobs: Logprobs | None) -> dict[str, Any]:
        shown = None if logprobs is None else _completion_logprobs(logprobs, 0)
        return {"index": choice.index, "text": text, "logprobs": shown}

    def _last(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "logprobs": None}


FORMATS: dict[str, Format] = {"chat": ChatFormat(), "completions": CompletionFormat()}


def _chat_logprobs(entries: Logprobs) -> dict[str, Any]:
    def shown(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: entry.get(key) for key in ("token", "logprob", "bytes")}

    content = [
        {**shown(entry), "top_logprobs": [shown(top) for top in entry.get("top") or ()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(entries: Logprobs, offset: int) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.get("token") or "")
    return {
        "tokens": [entry.get("token") for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {top.get("token"): top.get("logprob") for top in entry.get("top") or ()}
            for entry in entries
        ],
        "text_offset": offsets,
    }
