"""A constraint on a request's output, as JSON text, and its check. No torch import.

The text is an object with one key, the same from the API to the rank that samples:

    {"json_schema": {...}} | {"json_object": true} | {"regex": "..."} | {"choice": ["...", ...]}
    | {"lark": "..."}        (llguidance's variant of Lark)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits

TEXT_BYTES_MAX = 64 * 1024
PATTERN_BYTES_MAX = 8 * 1024
"""Of a regular expression or a Lark grammar: some of them take the square of their length."""

CHOICES_MAX = 1000
CHECK_SECONDS_MAX = 5.0
EXIT_MEMORY = 3
"""Of the probe, where the interpreter noticed that there is no more memory for it."""

# What the probe's own limits end it with: its time; its memory, for the allocator or the stack.
_CONDEMNED = (-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, EXIT_MEMORY)
_ERROR_CHARS_MAX = 300

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON's tokens: enough for indentation, but a model cannot fill its output with it."""


class GrammarError(ValueError):
    """The constraint cannot be used; the message is for whoever sent it."""


class CheckError(Exception):
    """The check itself did not come to its end; that says nothing about the constraint."""


def limits() -> LLParserLimits:
    """What a compiled grammar may use: a step's mask is a matter of milliseconds, or an error."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def canonical(constraint: dict[str, Any]) -> str:
    """The text of a constraint. The order of keys stays: it is the order of the output's.

    Raises ``GrammarError`` for what JSON does not have.
    """
    try:
        return json.dumps(constraint, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the constraint is not JSON: {error}") from None


def source_of(text: str) -> str:
    """The llguidance grammar of a constraint's text. Raises ``GrammarError``."""
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES_MAX:
        raise GrammarError(f"the constraint is longer than {TEXT_BYTES_MAX} bytes: simplify it")
    try:
        constraint = json.loads(text)
        json.dumps(constraint, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the constraint is not JSON: {error}") from None
    if not isinstance(constraint, dict) or len(constraint) != 1:
        raise GrammarError(f"a constraint has exactly one key, of {', '.join(_SOURCES)}")
    kind, value = next(iter(constraint.items()))
    if kind not in _SOURCES:
        raise GrammarError(f"{kind!r} is no kind of constraint: use one of {', '.join(_SOURCES)}")
    return _SOURCES[kind](value)


@lru_cache(maxsize=256)
def _verdict(text: str) -> str:
    """Why a grammar cannot work, or nothing: found out by a process that may be killed.

    Only what another trial would find, too: anything else is raised, and so not remembered.
    """
    source = source_of(text)
    # It runs native code over what a client sent, and needs none of our secrets.
    kept = ("PATH", "PYTHONPATH")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stopway_engine.grammar.probe"],
            input=source.encode(),
            capture_output=True,
            timeout=CHECK_SECONDS_MAX,
            check=False,
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
    except subprocess.TimeoutExpired:
        raise CheckError(
            f"the grammar could not be checked within {CHECK_SECONDS_MAX:.0f} s, for this machine "
            "is busy; send the request again"
        ) from None
    if done.returncode in _CONDEMNED:
        return "compiling it takes too much time or memory"
    if done.returncode:
        raise CheckError(
            f"the check of the grammar failed (exit {done.returncode}); send the request again"
        )
    return done.stdout.decode("utf-8", "replace")


def check(text: str) -> None:
    """Compile the constraint as a trial.

    Raises ``GrammarError`` when it cannot be used and ``CheckError`` when that is not known.
    Takes a tenth of a second for a text that was not checked lately, and at most
    ``CHECK_SECONDS_MAX``: not for an event loop's thread.
    """
    if problem := _verdict(text):
        raise GrammarError(f"the grammar cannot be used: {explain(problem)}")


def explain(error: str) -> str:
    """An error of the library on one bounded line."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line if len(line) <= _ERROR_CHARS_MAX else line[:_ERROR_CHARS_MAX] + "..."


def _json_schema(value: Any) -> str:
    if not isinstance(value, (dict, bool)):
        raise GrammarError("json_schema is an object: a JSON Schema")
    schema = value if isinstance(value, dict) else ({} if value else {"not": {}})
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE}
        )
    except ValueError as error:
        raise GrammarError(f"json_schema cannot be read: {explain(str(error))}") from None


def _json_object(value: Any) -> str:
    if value is not True:
        raise GrammarError("json_object is true, or left out")
    return _json_schema({"type": "object"})


def _pattern(value: Any, kind: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{kind} is a text that is not empty")
    if len(value.encode()) > PATTERN_BYTES_MAX:
        raise GrammarError(f"{kind} is longer than {PATTERN_BYTES_MAX} bytes: simplify it")
    return value


def _regex(value: Any) -> str:
    return LLMatcher.grammar_from_regex(_pattern(value, "regex"))


def _lark(value: Any) -> str:
    return LLMatcher.grammar_from_lark(_pattern(value, "lark"))


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= CHOICES_MAX:
        raise GrammarError(f"choice is a list of 1 to {CHOICES_MAX} texts")
    if not all(isinstance(text, str) and text for text in value):
        raise GrammarError("each choice is a text that is not empty")
    texts = (json.dumps(text, ensure_ascii=False) for text in value)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))


_SOURCES: dict[str, Callable[[Any], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}
