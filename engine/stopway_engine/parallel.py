"""How a model is cut over ranks: pipeline stages of layers, tensor-parallel slices of each layer.

Pure integers, no torch: a launcher checks a plan before any process starts. A rank's number is
``stage * tp + tp_index``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stopway_engine.modelspec import ModelError, ModelSpec

FFN_UNIT = 32
"""FFN columns are given out in runs of the quantization group, so a slice keeps whole groups."""

Span = tuple[int, int]
"""Half open: first, one past the last."""


@dataclass(frozen=True)
class ShardSpec:
    """One rank's part of the model. Spans are half open; ``vocab`` is its slice of the head.

    With more ranks than KV heads a KV head is held by several ranks, each with its own query
    heads.
    """

    tp: int
    pp: int
    tp_index: int
    stage: int
    layers: Span
    q_heads: Span
    kv_heads: Span
    ffn: Span
    vocab: Span

    @property
    def rank(self) -> int:
        """The rank's number in the group."""
        return self.stage * self.tp + self.tp_index

    @property
    def world(self) -> int:
        """Ranks in the group."""
        return self.tp * self.pp

    @property
    def first(self) -> bool:
        """Whether this rank embeds token ids."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this rank has a slice of the head."""
        return self.stage == self.pp - 1

    @property
    def samples(self) -> bool:
        """Whether this rank chooses tokens: TP 0 of the last stage."""
        return self.last and self.tp_index == 0

    @property
    def n_layers(self) -> int:
        """Layers on this rank."""
        return self.layers[1] - self.layers[0]

    @property
    def n_q_heads(self) -> int:
        """Query heads on this rank."""
        return self.q_heads[1] - self.q_heads[0]

    @property
    def n_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.kv_heads[1] - self.kv_heads[0]


def plan_shards(
    spec: ModelSpec, tp: int, pp: int, layers_per_stage: Sequence[int] | None = None
) -> list[ShardSpec]:
    """The shard of every rank, in rank order.

    ``layers_per_stage`` overrides the even split of layers. Raises ``ModelError`` when the model
    can't be cut that way.
    """
    if tp < 1 or pp < 1:
        raise ModelError("Tensor and pipeline parallelism are at least 1: correct the spec.")
    heads = _split_heads(spec, tp)
    ffn = _split_ffn(spec, heads)
    vocab = _split_even(spec.vocab, tp, FFN_UNIT if spec.vocab % FFN_UNIT == 0 else 1)
    stages = _split_layers(spec, pp, layers_per_stage)
    return [
        ShardSpec(tp, pp, t, stage, stages[stage], heads[t][0], heads[t][1], ffn[t], vocab[t])
        for stage in range(pp)
        for t in range(tp)
    ]


def _split_even(total: int, parts: int, unit: int = 1) -> list[Span]:
    """Contiguous spans, multiples of ``unit``; the first ones are the larger ones."""
    units = total // unit
    if units < parts:
        raise ModelError(
            f"{total} columns cannot be cut into {parts} parts of at least {unit}: use less tensor "
            "parallelism."
        )
    sizes = [units // parts + (i < units % parts) for i in range(parts)]
    return _spans([size * unit for size in sizes])


def _spans(sizes: Sequence[int]) -> list[Span]:
    spans, start = [], 0
    for size in sizes:
        spans.append((start, start + size))
        start += size
    return spans


def _split_heads(spec: ModelSpec, tp: int) -> list[tuple[Span, Span]]:
    """(query heads, KV heads) of each TP index."""
    if tp <= spec.n_kv_heads:
        group = spec.group
        return [((a * group, b * group), (a, b)) for a, b in _split_even(spec.n_kv_heads, tp)]
    copies = tp // spec.n_kv_heads
    if tp % spec.n_kv_heads or spec.group % copies:
        fitting = [
            n
            for n in range(1, spec.n_heads + 1)
            if n <= spec.n_kv_heads
            or (n % spec.n_kv_heads == 0 and spec.group % (n // spec.n_kv_heads) == 0)
        ]
        raise ModelError(
            f"A model with {spec.n_heads} heads and {spec.n_kv_heads} KV heads cannot be cut over "
            f"{tp} ranks: use tensor parallelism {', '.join(map(str, fitting))}."
        )
    share = spec.group // copies
    return [((t * share, (t + 1) * share), (t // copies, t // copies + 1)) for t in range(tp)]


def _split_ffn(spec: ModelSpec, heads: Sequence[tuple[Span, Span]]) -> list[Span]:
    """FFN columns of each TP index: ranks with fewer heads take more of them.

    The slowest rank sets the pace of a layer, so what is evened out is weights per layer, in
    columns of ``hidden`` (4 for each query or KV head dimension pair, 3 for each FFN column).
    """
    unit = FFN_UNIT if spec.ffn % FFN_UNIT == 0 else 1
    units, tp = spec.ffn // unit, len(heads)
    if units < tp:
        raise ModelError(f"An FFN of {spec.ffn} cannot be cut over {tp} ranks: use fewer ranks.")
    attention = [2 * spec.head_dim * ((q[1] - q[0]) + (k[1] - k[0])) for q, k in heads]
    target = (sum(attention) + 3 * spec.ffn) / tp
    ideal = [max(1.0, (target - cost) / (3 * unit)) for cost in attention]
    scale = units / sum(ideal)
    bounds = [round(scale * sum(ideal[: i + 1])) for i in range(tp)]
    bounds[-1] = units
    for i in range(tp):  # every rank gets at least one unit, in order
        bounds[i] = min(max(bounds[i], (bounds[i - 1] if i else 0) + 1), units - (tp - 1 - i))
    return _spans([(b - (bounds[i - 1] if i else 0)) * unit for i, b in enumerate(bounds)])


def _split_layers(spec: ModelSpec, pp: int, sizes: Sequence[int] | None) -> list[Span]:
    if pp > spec.n_layers:
        raise ModelError(
            f"{spec.n_layers} layers cannot be cut into {pp} stages: use less pipeline parallelism."
        )
    if sizes is None:
        # The last stage also has the head, so the larger stages come first.
        return _split_even(spec.n_layers, pp)
    if len(sizes) != pp or sum(sizes) != spec.n_layers or min(sizes) < 1:
        raise ModelError(
            f"The layers per stage {list(sizes)} do not make {pp} stages out of {spec.n_layers} "
            "layers: correct the list or leave it out."
        )
    return _spans(sizes)
