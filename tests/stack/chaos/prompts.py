"""What clients ask: few prompts, so that each greedy answer is known from an undisturbed run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KNOWN_TOKENS = 64  # of each undisturbed answer; the structured ones are whole by then
_WORDS = r"(sea|ship|storm)( (sea|ship|storm)){3}\."
_CITIES = ["Paris", "Lyon", "Nice"]
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": _CITIES},
        "digits": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 3,
            "maxItems": 6,
        },
    },
    "required": ["city", "digits"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat of one message; with ``structured_outputs`` a whole answer ``matches``."""

    text: str
    structured_outputs: dict[str, Any] | None = None
    matches: Callable[[str], bool] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def _is_words(text: str) -> bool:
    return re.fullmatch(_WORDS, text) is not None


def _is_of_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or set(value) != {"city", "digits"}:
        return False
    digits = value["digits"]
    good = isinstance(digits, list) and 3 <= len(digits) <= 6
    return good and value["city"] in _CITIES and all(digit in range(10) for digit in digits)


PROMPTS = (
    Prompt("What is the capital of France?"),
    Prompt("Tell a long story about a lighthouse."),
    Prompt("Count from one to a hundred, in words."),
    Prompt("Go on for very long: " + " ".join(f"sea {i} ship" for i in range(40))),
    Prompt("Go on: " + " ".join(f"storm {i} light" for i in range(80))),
    Prompt("Words of the sea:", {"regex": _WORDS}, _is_words),
    Prompt("A city and some digits, as JSON:", {"json": _SCHEMA}, _is_of_schema),
)


def body(prompt: int, **fields: object) -> dict[str, object]:
    """A chat completion's body: greedy, and going on until something, or its grammar, stops it."""
    asked = PROMPTS[prompt]
    ends: dict[str, object] = {"ignore_eos": True}
    if asked.structured_outputs is not None:
        ends = {"structured_outputs": asked.structured_outputs}
    return {
        "model": "smollm2-135m-instruct",
        "messages": asked.messages,
        "temperature": 0.0,
        **ends,
        **fields,
    }
