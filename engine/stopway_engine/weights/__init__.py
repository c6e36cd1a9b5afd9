"""Llama weights from GGUF or safetensors, cut to one rank's shard while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from stopway_engine.modelspec import ModelSpec
from stopway_engine.parallel import ShardSpec, Span
from stopway_engine.weights.gguf_file import GgufFile
from stopway_engine.weights.hf_folder import HfFolder
from stopway_engine.weights.matrix import Q4, Matrix, TensorSource, stack

__all__ = [
    "Q4",
    "LayerWeights",
    "Matrix",
    "ShardWeights",
    "TensorSource",
    "load_shard",
    "open_source",
]


@dataclass
class LayerWeights:
    """One layer's slice: ``qkv`` [(q + 2 kv) heads * d, hidden], ``o`` [hidden, q heads * d],
    ``gate_up`` [2 * ffn, hidden], ``down`` [hidden, ffn]; the norms are f32 [hidden].
    """

    attn_norm: torch.Tensor
    qkv: Matrix
    o: Matrix
    ffn_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass
class ShardWeights:
    """One rank's weights. ``embedding`` f32 [vocab, hidden] is on the first stage only, the final
    ``norm`` and ``head`` [vocab slice, hidden] on the last. ``layers`` are read one at a time.
    """

    embedding: torch.Tensor | None
    layers: Iterator[LayerWeights]
    norm: torch.Tensor | None
    head: torch.Tensor | None


def open_source(path: Path, spec: ModelSpec) -> TensorSource:
    """The tensors at ``path`` (a .gguf file or a Hugging Face folder). Raises ModelError."""
    return HfFolder(path) if path.is_dir() else GgufFile(path, spec)


def load_shard(path: Path, spec: ModelSpec, shard: ShardSpec) -> ShardWeights:
    """Read what ``shard`` needs of the model at ``path``, and nothing else. Raises ModelError."""
    source = open_source(path, spec)
    layers = (_load_layer(source, spec, shard, i) for i in range(*shard.layers))
    embedding = source.matrix("embed_tokens").dense if shard.first else None
    norm = head = None
    if shard.last:
        norm = source.vector("norm")
        head = source.matrix("embed_tokens" if spec.tied else "lm_head", rows=shard.vocab).dense
    return ShardWeights(embedding, layers, norm, head)


def _load_layer(source: TensorSource, spec: ModelSpec, shard: ShardSpec, i: int) -> LayerWeights:
    d, prefix = spec.head_dim, f"layers.{i}."

    def rows(name: str, span: Span, scale: int = 1) -> Matrix:
        return source.matrix(prefix + name, rows=(span[0] * scale, span[1] * scale))

    def columns(name: str, span: Span, scale: int = 1) -> Matrix:
        return source.matrix(prefix + name, cols=(span[0] * scale, span[1] * scale))

    return LayerWeights(
        attn_norm=source.vector(prefix + "input_layernorm"),
        qkv=stack(
            rows("self_attn.q_proj", shard.q_heads, d),
            rows("self_attn.k_proj", shard.kv_heads, d),
            rows("self_attn.v_proj", shard.kv_heads, d),
        ),
        o=columns("self_attn.o_proj", shard.q_heads, d),
        ffn_norm=source.vector(prefix + "post_attention_layernorm"),
        gate_up=stack(rows("mlp.gate_proj", shard.ffn), rows("mlp.up_proj", shard.ffn)),
        down=columns("mlp.down_proj", shard.ffn),
    )
