"""Where the requests with a grammar are in it: on the exec thread of the rank that samples.

A matcher is made when its request first samples, or samples again after a preemption, from the
output that the request already has; so it may be thrown away at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from stopway_core.types import RowWork

GrammarTable = dict[int, LLMatcher]
"""Compiled grammars by slot, none of which has consumed anything: the compiler's thread writes
whole entries, the exec thread copies what it finds."""


@dataclass(slots=True)
class _Place:
    matcher: LLMatcher
    position: int  # of the next token
    ahead: int = 0  # drafts that were consumed on trial


class Matchers:
    """One matcher for each running request with a grammar."""

    def __init__(self, table: GrammarTable, vocab: int) -> None:
        self._table, self._vocab = table, vocab
        self._places: dict[int, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def leave(self, rids: Iterable[int]) -> None:
        """Forget requests that have ended."""
        for rid in rids:
            self._places.pop(rid, None)

    def look_ahead(self, row: RowWork) -> list[np.ndarray]:
        """Which tokens may come at each place where ``row`` samples, bool [vocab] each.

        At places behind a draft, those that may come if the draft is right. There are fewer than
        ``row.samples`` where a draft is not allowed or ends the text: no sample can get beyond it.
        Where no token is allowed, or the matcher fails, all is false.
        """
        place = self._find(row)
        if place is None:
            return [np.zeros(self._vocab, bool)]
        drafts = row.tokens[len(row.tokens) - row.samples + 1 :]
        matcher, masks = place.matcher, []
        for i in range(row.samples):
            stopped = matcher.is_stopped()
            masks.append(self._mask(matcher))
            if i == len(drafts) or stopped or not masks[i][drafts[i]]:
                break
            if not matcher.consume_token(drafts[i]):
                break
            place.ahead += 1
        return masks

    def advance(self, row: RowWork, kept: Sequence[int]) -> None:
        """``row`` has got the tokens ``kept``, after ``look_ahead``."""
        place = self._places.get(row.rid)
        if place is None or kept[-1] < 0:
            return
        right = len(kept) - 1  # drafts
        matcher, ahead = place.matcher, place.ahead
        place.position += len(kept)
        place.ahead = 0
        if matcher.is_error() or not (
            (ahead == right or matcher.rollback(ahead - right)) and matcher.consume_token(kept[-1])
        ):
            del self._places[row.rid]  # an error stays; it may be a wrong draft's, so start anew

    def _find(self, row: RowWork) -> _Place | None:
        """The request's matcher, right before its first sample; ``None`` when it has failed."""
        fed = len(row.tokens) - row.samples + 1
        place = self._places.get(row.rid)
        if place is not None and place.position == row.start + fed and not place.ahead:
            return place
        self._places.pop(row.rid, None)
        compiled = self._table.get(row.grammar)
        if compiled is None:  # of a request that has ended: nobody else's grammar goes away
            return None
        output = (row.history[: row.start] + row.tokens[:fed])[row.prompt_len :]
        matcher = compiled.deep_copy()
        if output and not matcher.consume_tokens(output):
            return None
        place = self._places[row.rid] = _Place(matcher, row.start + fed)
        return place

    def _mask(self, matcher: LLMatcher) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return np.zeros(self._vocab, bool)
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab)
        return mask.astype(bool)
