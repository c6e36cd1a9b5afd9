"""The sampler of the simulated model: drafts, grammars, and tokens that only it knows yet.

A grammar here is a text ``MODULUS[:END]``: an output token may not make the sum of itself and its
place in the output a multiple of MODULUS; from output END on only the end of sequence (0) may
come, and with END 0 nothing may. What is forbidden depends on how many tokens came before, so a
matcher that was not restored, or advanced twice, shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stopway_core.types import DROPPED, NO_SOURCE, REJECTED, RowWork, StepWork
from stopway_sim import model


@dataclass(frozen=True, slots=True)
class ToyGrammar:
    """A parsed text."""

    modulus: int
    end: int | None = None

    def choose(self, wanted: int, index: int, vocab: int) -> int:
        """The token nearest above ``wanted`` that may stand at output ``index``, or REJECTED."""
        if self.end == 0:
            return REJECTED
        if self.end is not None and index >= self.end:
            return 0
        for offset in range(vocab):
            token = (wanted + offset) % vocab
            if token and (token + index) % self.modulus:
                return token
        return REJECTED


def parse(text: str) -> ToyGrammar:
    """The grammar of a text. Raises ``ValueError`` for one that can't be compiled."""
    modulus, _, end = text.partition(":")
    if int(modulus) < 2:
        raise ValueError(f"a modulus of {modulus} forbids everything")
    return ToyGrammar(int(modulus), int(end) if end else None)


@dataclass(slots=True)
class Sampler:
    """What the sampling rank keeps between steps."""

    vocab: int
    grammars: dict[int, ToyGrammar] = field(default_factory=dict)  # by slot
    newest: dict[tuple[int, int], int] = field(default_factory=dict)  # (step, row) -> last token
    _matchers: dict[int, int] = field(default_factory=dict)  # rid -> outputs consumed

    def fed(self, row: RowWork) -> list[int]:
        """The tokens that a row feeds."""
        if row.source == NO_SOURCE:
            return row.tokens
        return [max(0, self.newest[row.source])]

    def sample(
        self, work: StepWork, hidden: list[list[int]], gone: set[int]
    ) -> tuple[list[int], list[int]]:
        """(tokens, how many for each sampling row); ``gone`` are rids whose rows left the step."""
        tokens: list[int] = []
        counts: list[int] = []
        for rid in work.left:
            self._matchers.pop(rid, None)
        for row, states in zip(work.rows, hidden, strict=True):
            if not row.samples:
                continue
            dropped = (
                row.rid in gone
                or self.newest.get(row.source, 0) < 0
                # Its request has ended, and nobody else wanted the grammar.
                or (row.grammar and row.grammar not in self.grammars)
            )
            kept = [DROPPED] if dropped else self._row(row, states[-row.samples :])
            self.newest[work.step, len(counts)] = kept[-1]
            tokens += kept
            counts.append(len(kept))
        return tokens, counts

    def _row(self, row: RowWork, states: list[int]) -> list[int]:
        kept: list[int] = []
        drafts = row.tokens[len(row.tokens) - row.samples + 1 :]
        for at, state in enumerate(states):
            kept.append(self._token(row, model.sample(state, self.vocab)))
            if kept[-1] < 0 or at == len(drafts) or kept[-1] != drafts[at]:
                break
        return kept

    def _token(self, row: RowWork, wanted: int) -> int:
        if not row.grammar:
            return wanted
        before = row.start + len(row.tokens) - row.samples + 1 - row.prompt_len
        index = self._matchers.setdefault(row.rid, before)  # restored from what is known
        self._matchers[row.rid] = index + 1
        return self.grammars[row.grammar].choose(wanted, index, self.vocab)
