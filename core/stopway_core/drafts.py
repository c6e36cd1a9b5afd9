"""Drafts by n-grams: what followed the last time that a request's newest tokens came up.

Source: prompt lookup decoding (A. Saxena, 2023), as vLLM's and transformers' n-gram speculators
do it. Proposals depend on the request's tokens and results alone, so a run can be repeated.
"""

from __future__ import annotations

NGRAM = 3
POSITIONS_MAX = 8192  # so many of the newest are indexed
LEARN_MAX = 256  # positions learned in one go: a prompt is learned over several turns
REST_TOKENS = 8  # no proposals for so many tokens after one of which nothing was right


class Drafter:
    """Proposals for one request, and how good they were."""

    __slots__ = ("_index", "_rest", "_seen", "_size", "_tokens", "limit")

    def __init__(self, tokens: list[int], limit: int) -> None:
        self.limit = limit  # tokens of a proposal at most
        self._size = limit
        self._rest = 0
        self._tokens = tokens
        self._index: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._seen = 0  # n-grams that end before this position are in the index

    def propose(self, room: int) -> list[int]:
        """At most ``room`` tokens that may follow; empty when nothing suggests any."""
        size = min(self._size, room)
        tokens = self._tokens
        if size < 1 or len(tokens) < self._rest or len(tokens) <= NGRAM:
            return []
        self._learn()
        at = self._index.get(tuple(tokens[-NGRAM:]))
        return [] if at is None else tokens[at : at + size]

    def verified(self, drafted: int, accepted: int) -> None:
        """A proposal has been checked: longer ones after a success, shorter or none after that."""
        if accepted == drafted:
            self._size = min(self.limit, self._size + 1)
            return
        self._size = max(1, accepted)
        if not accepted:
            self._rest = len(self._tokens) + REST_TOKENS

    def follow(self, tokens: list[int]) -> None:
        """Go on with a copy of the same tokens."""
        self._tokens = tokens

    def _learn(self) -> None:
        """Index n-grams that something follows, each position once, a bounded number of them."""
        tokens, index = self._tokens, self._index
        begin = max(self._seen, NGRAM, len(tokens) - POSITIONS_MAX)
        end = min(len(tokens), begin + LEARN_MAX)
        for at in range(begin, end):
            index[tuple(tokens[at - NGRAM : at])] = at
        self._seen = max(self._seen, end)
