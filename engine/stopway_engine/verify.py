"""From logits to a step's tokens: samples at every place, drafts kept as far as they are right.

A row with drafts is sampled at each of its places just as if the tokens before it had been sampled
one by one. It keeps its samples up to and including the first that differs from its draft, so its
output is the one without drafts, only sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stopway_core.types import DROPPED, Logprobs, RowWork, StepResult
from stopway_engine.grammar.matchers import Matchers
from stopway_engine.sampler import lanes_of, sample


@dataclass(slots=True)
class Kept:
    """What a row has got: at least one token, or what stands in its place."""

    tokens: list[int]
    logprobs: list[Logprobs | None]  # parallel, or empty when nobody in the step wants any


def sample_rows(
    logits: Tensor, rows: Sequence[RowWork], eos: Sequence[int], matchers: Matchers | None
) -> list[Kept]:
    """The tokens of each of ``rows``, all of which sample.

    ``logits`` f32 [sum of samples, vocab] may be changed. Raises ``NonFiniteError``.
    """
    allowed: dict[int, np.ndarray] = {}
    places: list[int] = []  # of each row: how many of its samples may be kept
    first = 0
    for row in rows:
        masks = matchers.look_ahead(row) if matchers is not None and row.grammar else None
        places.append(row.samples if masks is None else len(masks))
        if masks is not None:
            allowed |= {first + i: mask for i, mask in enumerate(masks)}
        first += row.samples
    tokens, logprobs = sample(logits, lanes_of(rows), eos, allowed)
    found: list[Kept] = []
    first = 0
    for row, most in zip(rows, places, strict=True):
        end = first + _right(row, tokens[first : first + most])
        found.append(Kept(tokens[first:end], logprobs[first:end]))
        if matchers is not None and row.grammar:
            matchers.advance(row, tokens[first:end])
        first += row.samples
    return found


def _right(row: RowWork, samples: Sequence[int]) -> int:
    """How many of ``samples`` to keep: up to the first that its draft differs from, and that."""
    drafts = row.tokens[len(row.tokens) - row.samples + 1 :]
    for i, (token, draft) in enumerate(zip(samples, drafts, strict=False)):
        if token != draft:
            return i + 1
    return len(samples)


def result_of(step: int, rows: Sequence[RowWork], kept: Mapping[int, Kept]) -> StepResult:
    """The result of a step of ``rows``; those that sample and are not in ``kept`` were dropped."""
    sampling = [(i, row) for i, row in enumerate(rows) if row.samples]
    parts = [kept.get(i) or Kept([DROPPED], []) for i, _ in sampling]
    result = StepResult(step, [token for part in parts for token in part.tokens])
    if any(part.logprobs for part in parts):
        for part in parts:
            result.logprobs += part.logprobs or [None] * len(part.tokens)
    if any(row.samples > 1 for _, row in sampling):
        result.counts = [len(part.tokens) for part in parts]
    return result
