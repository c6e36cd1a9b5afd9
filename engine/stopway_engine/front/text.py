"""From tokens to the text that may be delivered: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stopway_engine.tokenizer import Detokenizer


class StopMatcher:
    """Finds the first of several strings in a text that comes in pieces.

    What may be the beginning of a stop string is held back, and no longer than that: the longest
    end of the text that is a proper beginning of one of them.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that ``piece`` makes deliverable; sets ``found`` when a stop string is met."""
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        best = -1
        for stop in self._stops:
            at = text.find(stop)
            # The one that is complete first wins; of two that end together, the longer.
            if at >= 0 and (best < 0 or at + len(stop) < best or self._longer(stop, at, best)):
                best, self.found = at + len(stop), stop
        if self.found is not None:
            self._held = ""
            return text[:best] if self._include else text[: best - len(self.found)]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: a near-miss is delivered whole."""
        held, self._held = self._held, ""
        return held

    def _longer(self, stop: str, at: int, best: int) -> bool:
        assert self.found is not None
        return at + len(stop) == best and len(stop) > len(self.found)

    def _beginning(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


@dataclass(slots=True)
class Piece:
    """Text that may be delivered, and how many tokens it completes."""

    text: str
    tokens: int


class ChoiceText:
    """The text of one choice."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, include: bool) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include)
        self._pending = 0
        self.tokens = 0
        self.hit: int | None = None  # output tokens up to and with the end of the stop string

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        return self._matcher.found

    def push(self, token: int) -> Piece | None:
        """One more token; ``None`` while nothing is deliverable, and after a hit."""
        if self.hit is not None:
            return None
        self.tokens += 1
        self._pending += 1
        text = self._matcher.push(self._detokenizer.push(token))
        if self._matcher.found is not None:
            self.hit = self.tokens
        elif not text:
            return None
        piece = Piece(text, self._pending)
        self._pending = 0
        return piece

    def finish(self) -> str:
        """The rest of the text at the end of the choice; half a character is not in it."""
        return "" if self.hit is not None else self._matcher.flush() + self._detokenizer.finish()
