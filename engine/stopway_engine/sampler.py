"""Choosing tokens: a draw is a function of (logits, params, seed, position) and nothing else.

Order, as in OpenAI's API and vLLM: penalties, then what a grammar allows, then temperature, min_p,
top_k, top_p. Log probabilities are those of the raw logits. Every operation is row by row, so
neighbours in the batch change nothing; ties at a cut are all kept, so the order of a sort does not
matter either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from stopway_core.types import REJECTED, Logprobs, RowWork, SamplingParams
from stopway_engine.numerics import NonFiniteError

_GREEDY_BELOW = 1e-5
"""A temperature so small that dividing by it says nothing: greedy."""

_LOGIT_MAX = 1e30
"""Bound of a penalized logit: no parameter of a client's may make one infinite."""

_TOP_P_PREFIX = 1024
"""How many of the largest logits are sorted before a full sort is tried."""

_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class Lane:
    """One place where a token is sampled: after the first ``fed`` of its row's tokens."""

    row: RowWork
    fed: int

    @property
    def position(self) -> int:
        """Where the sampled token will stand."""
        return self.row.start + self.fed

    def known(self) -> list[int]:
        """All tokens before it. What lies beyond ``start`` in the history may still change."""
        return self.row.history[: self.row.start] + self.row.tokens[: self.fed]


def lanes_of(rows: Sequence[RowWork]) -> list[Lane]:
    """Where ``rows`` sample, in the order of the rows of their logits."""
    return [
        Lane(row, fed)
        for row in rows
        for fed in range(len(row.tokens) - row.samples + 1, len(row.tokens) + 1)
    ]


def sample(
    logits: Tensor,
    lanes: Sequence[Lane],
    eos: Sequence[int] = (),
    allowed: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> tuple[list[int], list[Logprobs | None]]:
    """One token for each row of ``logits`` f32 [n, vocab], which may be changed.

    ``lanes`` are parallel to the logits. ``allowed`` has, for the lanes with a grammar, a bool
    [vocab]: where it is false throughout, the token is ``REJECTED``. For the others ``eos`` are
    masked, with ``stop_token_ids``, while ``min_tokens`` is not reached. The second list is empty
    when no lane wants log probabilities. Raises ``NonFiniteError``.
    """
    assert logits.shape[0] == len(lanes), "one row of logits for each lane"
    if not lanes:
        return [], []
    params = [lane.row.params for lane in lanes]
    wants = [i for i, p in enumerate(params) if p.logprobs >= 0]
    log_probs = torch.log_softmax(logits[wants], -1) if wants else None
    best, tokens = logits.max(-1)
    _check_finite(best, lanes)
    changed = [i for i, p in enumerate(params) if p.penalized or p.min_tokens or i in allowed]
    for i in changed:
        _penalize(logits[i], lanes[i])
        if i not in allowed:
            _forbid_end(logits[i], lanes[i], eos)
    rejected = _mask(logits, allowed)
    if changed:
        tokens[changed] = logits[changed].argmax(-1)
    chosen: list[int] = tokens.tolist()
    drawn = [i for i, p in enumerate(params) if p.temperature > _GREEDY_BELOW]
    if drawn:
        part = logits if len(drawn) == len(lanes) else logits[drawn]
        for i, token in zip(drawn, _draw(part, [lanes[i] for i in drawn]), strict=True):
            chosen[i] = token
    for i in rejected:
        chosen[i] = REJECTED
    return chosen, _logprobs(log_probs, wants, chosen, params)


def _mask(logits: Tensor, allowed: Mapping[int, np.ndarray]) -> list[int]:
    """Keep only the allowed tokens, in place; returns the lanes in which there are none."""
    rejected = [i for i, tokens in allowed.items() if not tokens.any()]
    masked = [i for i in allowed if i not in rejected]
    if masked:
        forbidden = torch.from_numpy(~np.stack([allowed[i] for i in masked]))
        logits[masked] = logits[masked].masked_fill_(forbidden.to(logits.device), -torch.inf)
    return rejected


def _check_finite(best: Tensor, lanes: Sequence[Lane]) -> None:
    """Raise ``NonFiniteError`` if the model itself, before any client's wish, went wrong."""
    if bool(torch.isfinite(best).all()):
        return
    bad = [lanes[i].row.rid for i in torch.nonzero(~torch.isfinite(best)).flatten().tolist()]
    raise NonFiniteError(
        f"The model's logits for row ids {bad} have no finite maximum: check the weights and "
        "the number format (try numerics: invariant, which computes in f32)."
    )


def _penalize(logits: Tensor, lane: Lane) -> None:
    """Repetition over prompt and output; presence and frequency over the output alone."""
    params = lane.row.params
    if not params.penalized:
        return
    history = torch.tensor(lane.known(), dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.unique(history)
        values = logits[seen]
        scaled = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        logits[seen] = scaled.clamp(-_LOGIT_MAX, _LOGIT_MAX)
    if params.frequency_penalty or params.presence_penalty:
        output, counts = torch.unique(history[lane.row.prompt_len :], return_counts=True)
        logits[output] -= params.frequency_penalty * counts + params.presence_penalty


def _forbid_end(logits: Tensor, lane: Lane, eos: Sequence[int]) -> None:
    row = lane.row
    if lane.position - row.prompt_len < row.params.min_tokens:
        for token in (*eos, *row.params.stop_token_ids):
            if token < logits.shape[0]:
                logits[token] = -torch.inf


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a hash of its arguments (two rounds of splitmix64)."""
    state = seed & _MASK64
    for word in (position, 0x5A17):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _draw(logits: Tensor, lanes: Sequence[Lane]) -> list[int]:
    """Draw from each row's distribution by inverting its cumulative sum (f64) in token order."""
    params = [lane.row.params for lane in lanes]
    # Against the largest first: however small the temperature, nothing overflows.
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / _column([p.temperature for p in params], logits)
    if any(p.min_p > 0 for p in params):
        log_min = [np.log(p.min_p) if p.min_p > 0 else -np.inf for p in params]
        floor = logits.amax(-1, keepdim=True) + _column(log_min, logits)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    logits = _keep_top_k(logits, params)
    logits = _keep_top_p(logits, params)
    weights = (logits - logits.amax(-1, keepdim=True)).double().exp_()
    sums = weights.cumsum_(-1)
    draws = [uniform(lane.row.params.seed, lane.position) for lane in lanes]
    # A draw below the total falls in the step of a token with weight: sums are flat elsewhere.
    wanted = _column(draws, sums) * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True)[:, 0]
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())[:, 0]
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens


def _keep_top_k(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Mask all below each row's k-th largest logit."""
    vocab = logits.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if not any(ks):
        return logits
    largest = logits.topk(max(ks), -1).values
    index = torch.tensor([max(k, 1) - 1 for k in ks], device=logits.device)[:, None]
    off = torch.tensor([k == 0 for k in ks], device=logits.device)[:, None]
    floor = largest.gather(1, index).masked_fill(off, -torch.inf)
    return logits.masked_fill(logits < floor, -torch.inf)


def _keep_top_p(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Mask all below the smallest logit of each row's nucleus (its mass reaches top_p)."""
    if all(p.top_p >= 1.0 for p in params):
        return logits
    vocab = logits.shape[1]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
    limited = (top_p < 1.0)[:, None]
    total = logits.double().logsumexp(-1, keepdim=True)
    for width in (min(_TOP_P_PREFIX, vocab), vocab):
        ordered = logits.topk(width, -1).values
        mass = (ordered.double() - total).exp_().cumsum_(-1)
        reached = mass >= top_p[:, None]
        if width == vocab or bool((reached[:, -1:] | ~limited).all()):
            break
    # The first token that reaches the mass is the nucleus' last; rounding may leave none: keep all.
    count = torch.where(reached.any(-1), reached.int().argmax(-1), width - 1)
    floor = ordered.gather(1, count[:, None]).masked_fill(~limited, -torch.inf)
    return logits.masked_fill(logits < floor, -torch.inf)


def _logprobs(
    log_probs: Tensor | None,
    wants: Sequence[int],
    chosen: Sequence[int],
    params: Sequence[SamplingParams],
) -> list[Logprobs | None]:
    if log_probs is None:
        return []
    out: list[Logprobs | None] = [None] * len(params)
    most = max(params[i].logprobs for i in wants)
    values, ids = log_probs.topk(min(most, log_probs.shape[1]), -1) if most else (None, None)
    for j, i in enumerate(wants):
        if chosen[i] < 0:
            continue
        n = params[i].logprobs
        top: list[tuple[int, float]] = []
        if n and ids is not None and values is not None:
            top = list(zip(ids[j, :n].tolist(), values[j, :n].tolist(), strict=True))
        out[i] = Logprobs(float(log_probs[j, chosen[i]]), top)
    return out
