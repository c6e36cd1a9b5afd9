"""Compiles grammars off the exec queue, in a thread of its own. No torch import.

A text has passed ``spec.check`` before it gets here, so compiling it is bounded; the library lets
go of the interpreter while it compiles.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer

from stopway_engine.grammar.matchers import GrammarTable
from stopway_engine.grammar.spec import GrammarError, explain, limits, source_of
from stopway_engine.outbox import Outbox
from stopway_engine.tokenizer import TextCodec


class Vocabulary:
    """A codec as ``LLTokenizer`` wants to see it: the bytes of every row of the model's head."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.eos_token_id = codec.eos_ids[0]
        self.tokens, self.special_token_ids = codec.vocabulary()

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._codec.encode(text)


def make_tokenizer(codec: TextCodec) -> LLTokenizer:
    """The library's view of the model's tokens (a tenth of a second)."""
    return LLTokenizer(Vocabulary(codec), eos_token=list(codec.eos_ids))  # type: ignore[arg-type]


class CompilerError(Exception):
    """No grammar can be compiled on this rank, whatever it says: the rank must end."""


class GrammarCompiler:
    """One thread that fills a table; a file descriptor wakes the control loop.

    Calls take effect in their order. A slot is compiled into again only after it was forgotten,
    and forgotten only after its result was taken.
    """

    def __init__(self, load: Callable[[], TextCodec]) -> None:
        """``load`` runs in the thread, as soon as it starts.

        Not only when there is a grammar: the library keeps the interpreter to itself while it
        takes the vocabulary in (a tenth of a second), which must not be when stops have to turn.
        """
        self.table: GrammarTable = {}
        self._load = load
        self._work: queue.SimpleQueue[tuple[int, str | None] | None] = queue.SimpleQueue()
        self._done: Outbox[tuple[int, str] | CompilerError] = Outbox()
        self._thread = threading.Thread(target=self._main, name="grammar", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def fileno(self) -> int:
        """Readable when ``take`` has something, or raises."""
        return self._done.fileno()

    def compile(self, slot: int, text: str) -> None:
        """Compile a constraint into ``slot``; ``take`` has the outcome some time later."""
        self._work.put((slot, text))

    def forget(self, slot: int) -> None:
        """Let go of what is in ``slot``. Requests that run with it are not disturbed."""
        self._work.put((slot, None))

    def take(self) -> list[tuple[int, str]]:
        """(slot, why it cannot be used, or nothing) of what was compiled since the last call.

        Raises ``CompilerError`` when the thread could not begin: that is no grammar's fault.
        """
        taken = []
        for item in self._done.take():
            if isinstance(item, CompilerError):
                raise item
            taken.append(item)
        return taken

    def finish(self, timeout_s: float) -> None:
        """End the thread after what it has to do; waits at most ``timeout_s``."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            tokenizer = make_tokenizer(self._load())
        except Exception as problem:  # whatever it was, the control loop must hear of it
            message = (
                "the grammar compiler cannot take in the model's tokenizer "
                f"({_reason(problem)}); check the model's files"
            )
            self._done.put(CompilerError(message))
            return
        while (work := self._work.get()) is not None:
            slot, text = work
            if text is None:
                self.table.pop(slot, None)
                continue
            error = ""
            try:
                self.table[slot] = _compile(tokenizer, text)
            except Exception as problem:  # whoever waits for the grammar must hear of it
                error = _reason(problem)
            self._done.put((slot, error))


def _reason(problem: Exception) -> str:
    return explain(str(problem)) or type(problem).__name__


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, source_of(text), log_level=0, limits=limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    matcher.compute_bitmask()  # the first mask is the dearest, and shows what cannot begin
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
