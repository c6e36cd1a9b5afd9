"""Rotary embedding, attention and one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stopway_engine.batch import Batch, DecodeGroup, Segment, TileGroup
from stopway_engine.collective import Collective
from stopway_engine.kernels import RmsNorm, make_linear, silu_mul
from stopway_engine.kv import KvCache
from stopway_engine.modelspec import ModelSpec
from stopway_engine.numerics import KEY_TILE, QUERY_TILE
from stopway_engine.parallel import ShardSpec
from stopway_engine.weights import LayerWeights

SMALL_DECODE_MAX = 1
"""Up to this many decoding rows the fused attention beats two batched products."""


class Rope:
    """Rotary tables for every position of the context, [context, head_dim] each."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        half = spec.head_dim // 2
        frequency = spec.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        if spec.rope_factors:
            frequency = frequency / torch.tensor(spec.rope_factors, dtype=torch.float64)
        angle = torch.arange(spec.context, dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        self._cos = torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype)
        # Rotating swaps a head's halves; the first half's sign is kept here, once for all.
        self._sin = torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of ``positions`` int64 [n], each [n, 1, head_dim]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate ``heads`` [n, heads, head_dim] in place by the tables of their positions."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


@dataclass
class StepContext:
    """What every layer of a step reads: the batch, its rotary tables, the cache, the group.

    ``bits`` f32 [1, hidden] rides on a layer's last sum over the TP group and comes back summed.
    """

    batch: Batch
    cos: Tensor
    sin: Tensor
    kv: KvCache
    collective: Collective
    bits: Tensor | None = None


class Attention:
    """Grouped-query attention of one rank's heads over the paged cache."""

    def __init__(self, spec: ModelSpec, shard: ShardSpec) -> None:
        self._d = spec.head_dim
        self._heads = shard.n_q_heads
        self._kv_heads = shard.n_kv_heads
        self._group = shard.n_q_heads // shard.n_kv_heads
        self._scale = spec.head_dim**-0.5

    def __call__(self, step: StepContext, layer: int, qkv: Tensor) -> Tensor:
        """Store the new keys and values, then attend.

        ``qkv`` [padded, heads + 2 * kv heads, d], already rotated; returns [padded, heads * d].
        """
        batch, kv = step.batch, step.kv
        kv.write(layer, batch.where, qkv[: batch.n, self._heads :])
        if len(batch.decodes) == 1 and not batch.segments:
            return self._decode(batch.decodes[0], kv, layer, qkv)
        out = qkv.new_zeros((batch.padded, self._heads * self._d))
        for group in batch.decodes:
            out[group.first : group.first + group.count] = self._decode(group, kv, layer, qkv)
        for segment in batch.segments:
            rows = slice(segment.first, segment.first + segment.count)
            out[rows] = self._prefill(segment, kv, layer, qkv[rows])
        for tiles in batch.tiles:
            self._tiles(tiles, kv, layer, qkv, out)
        return out

    def _decode(self, group: DecodeGroup, kv: KvCache, layer: int, qkv: Tensor) -> Tensor:
        b, g, h, d = group.count, self._group, self._kv_heads, self._d
        q = qkv[group.first : group.first + b, : self._heads].view(b, h, g, d)
        keys, values = kv.read(layer, group.blocks, b)
        if b <= SMALL_DECODE_MAX or qkv.device.type != "cpu":
            mask = group.mask[:, None].expand(b, h, g, keys.shape[2])
            out = functional.scaled_dot_product_attention(
                q, keys.transpose(0, 1), values.transpose(0, 1), mask, scale=self._scale
            )
            return out.reshape(b, h * g * d)
        # One product over all rows and heads; the fused kernel repacks bf16 keys, 3x slower here.
        t = keys.shape[2]
        scores = torch.bmm(
            q.transpose(0, 1).reshape(h * b, g, d), keys.view(h * b, t, d).transpose(1, 2)
        )
        scores.view(h, b, g, t).mul_(self._scale).add_(group.mask)
        out = torch.bmm(scores.softmax(-1), values.view(h * b, t, d))
        return out.view(h, b, g, d).transpose(0, 1).reshape(b, h * g * d)

    def _prefill(self, segment: Segment, kv: KvCache, layer: int, qkv: Tensor) -> Tensor:
        n, g, h, d = segment.count, self._group, self._kv_heads, self._d
        q = qkv[:, : self._heads].view(n, h, g, d).permute(1, 2, 0, 3)
        if segment.mask is None:  # the chunk is the whole context: no need to read the cache
            new = qkv[:, self._heads :].transpose(0, 1)
            keys, values = new[:h], new[h:]
        else:
            read = kv.read(layer, segment.blocks, 1)
            keys, values = (found[:, 0, : segment.context] for found in read)
        # KV heads are the batch and a group's query heads share its keys without a copy.
        out = functional.scaled_dot_product_attention(
            q,
            keys[:, None].expand(h, g, segment.context, d),
            values[:, None].expand(h, g, segment.context, d),
            segment.mask,
            is_causal=segment.mask is None,
            scale=self._scale,
        )
        return out.permute(2, 0, 1, 3).reshape(n, h * g * d)

    def _tiles(self, tiles: TileGroup, kv: KvCache, layer: int, qkv: Tensor, out: Tensor) -> None:
        """Attention whose order of operations depends on a row's own position only.

        Every product is [group * QUERY_TILE, d] x [d, KEY_TILE] (or its counterpart), a maximum is
        exact in any order, and the sums over key tiles are taken one after the other from zero:
        key tiles after a row's position add exact zeros.
        """
        r, g, h, d = tiles.rows.shape[0], self._group, self._kv_heads, self._d
        keys, values = (
            found.transpose(0, 1).reshape(r, h, -1, KEY_TILE, d)
            for found in kv.read(layer, tiles.blocks, r)
        )
        k, m = keys.shape[2], g * QUERY_TILE
        q = qkv[tiles.rows.view(-1), : self._heads].view(r, QUERY_TILE, h, g, d)
        q = q.permute(0, 2, 3, 1, 4).reshape(r, h, 1, m, d).expand(r, h, k, m, d)
        scores = torch.bmm(
            q.reshape(-1, m, d), keys.reshape(-1, KEY_TILE, d).transpose(1, 2).contiguous()
        ).view(r, h, k, g, QUERY_TILE, KEY_TILE)
        scores.mul_(self._scale).add_(tiles.mask[:, :, :, None])
        scores.sub_(scores.amax(dim=(2, 5), keepdim=True)).exp_()
        sums = scores.sum(-1, keepdim=True).view(r, h, k, m, 1)
        parts = torch.bmm(scores.view(-1, m, KEY_TILE), values.reshape(-1, KEY_TILE, d))
        parts = parts.view(r, h, k, m, d)
        total, weight = parts.new_zeros((r, h, m, d)), parts.new_zeros((r, h, m, 1))
        for i in range(k):
            total += parts[:, :, i]
            weight += sums[:, :, i]
        found = (total / weight).view(r, h, g, QUERY_TILE, d).permute(0, 3, 1, 2, 4)
        out[tiles.target] = found.reshape(r * QUERY_TILE, h * g * d)[tiles.live]


class DecoderLayer:
    """One layer of the stage: attention and gated feed-forward, each added to the residual."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: ShardSpec,
        weights: LayerWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        invariant: bool,
    ) -> None:
        self._heads = shard.n_q_heads + 2 * shard.n_kv_heads
        self._rotated = shard.n_q_heads + shard.n_kv_heads
        self._d, self._ffn = spec.head_dim, shard.ffn[1] - shard.ffn[0]
        self._sharded = shard.tp > 1
        self._attention = Attention(spec, shard)
        self._attn_norm = RmsNorm(weights.attn_norm, spec.rms_eps, dtype, device)
        self._ffn_norm = RmsNorm(weights.ffn_norm, spec.rms_eps, dtype, device)
        self._qkv, self._o, self._gate_up, self._down = (
            make_linear(matrix, device, invariant=invariant)
            for matrix in (weights.qkv, weights.o, weights.gate_up, weights.down)
        )

    def __call__(self, step: StepContext, layer: int, hidden: Tensor) -> None:
        """Add this layer's output to the residual ``hidden``, f32 [padded, hidden], in place."""
        qkv = self._qkv(self._attn_norm(hidden)).view(-1, self._heads, self._d)
        rotate_(qkv[:, : self._rotated], step.cos, step.sin)
        self._add(step, hidden, self._o(self._attention(step, layer, qkv)))
        gate_up = self._gate_up(self._ffn_norm(hidden))
        self._add(step, hidden, self._down(silu_mul(gate_up, self._ffn)), step.bits)

    def _add(
        self, step: StepContext, hidden: Tensor, part: Tensor, bits: Tensor | None = None
    ) -> None:
        if self._sharded:
            part = part.float() if bits is None else torch.cat([part, bits])  # f32 either way
            step.collective.all_reduce(part)
            if bits is not None:
                bits.copy_(part[-1:])
                part = part[:-1]
        hidden.add_(part)
