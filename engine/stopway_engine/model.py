"""One rank's part of a Llama model: embedding, layers, head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stopway_core.types import RowWork
from stopway_engine.batch import Batch, build_batch
from stopway_engine.collective import Collective
from stopway_engine.kernels import RmsNorm, compute_dtype, make_linear
from stopway_engine.kv import KvCache
from stopway_engine.layers import DecoderLayer, Rope, StepContext
from stopway_engine.leaving import Stayed, Watch
from stopway_engine.modelspec import ModelSpec
from stopway_engine.numerics import ROW_TILE, Numerics
from stopway_engine.parallel import ShardSpec
from stopway_engine.weights import Matrix, load_shard

REFINED = 8
"""How many of a row's largest logits are computed again in f32."""


class Model:
    """The layers of one stage, this rank's slice of each, on one device.

    ``dtype`` is what linear layers and the KV cache use; the residual is f32 throughout.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        shard: ShardSpec,
        numerics: Numerics,
        device: torch.device,
        *,
        leaves: bool = True,
    ) -> None:
        self.spec, self.shard, self.device = spec, shard, device
        self._leaves = leaves
        self.invariant = numerics is Numerics.INVARIANT
        self.dtype = compute_dtype(device, invariant=self.invariant)
        weights = load_shard(path, spec, shard)
        self._embedding = None
        if weights.embedding is not None:
            self._embedding = weights.embedding.to(device=device, dtype=self.dtype)
        self._layers = [
            DecoderLayer(spec, shard, layer, self.dtype, device, invariant=self.invariant)
            for layer in weights.layers
        ]
        self._norm, self._head, self._exact_head = None, None, None
        if weights.head is not None and weights.norm is not None:
            self._norm = RmsNorm(weights.norm, spec.rms_eps, self.dtype, device)
            self._head = make_linear(Matrix(weights.head), device, invariant=self.invariant)
            if self.dtype is torch.bfloat16:
                self._exact_head = weights.head.to(device=device, dtype=self.dtype)
                self._exact_norm = RmsNorm(weights.norm, spec.rms_eps, torch.float32, device)
        self._rope = Rope(spec, self.dtype, device)

    def embed(self, batch: Batch) -> Tensor:
        """The residual at the first stage, f32 [padded, hidden]."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding[batch.tokens].float()

    def batch(self, rows: Sequence[RowWork], block_size: int) -> Batch:
        """``rows`` flattened for this model's kernels."""
        return build_batch(rows, block_size, self.dtype, self.device, invariant=self.invariant)

    def forward(
        self,
        rows: Sequence[RowWork],
        batch: Batch,
        hidden: Tensor,
        kv: KvCache,
        collective: Collective,
    ) -> Stayed:
        """Run this stage's layers over the residual ``hidden``, f32 [padded, hidden], in place.

        ``batch`` is of ``rows``. A row whose request has ended meanwhile may leave between two
        layers; when all have left nothing more is computed.
        """
        stayed = Stayed(list(rows), batch, hidden, list(range(len(rows))))
        watch = Watch(self.shard.tp, self.device, leaves=self._leaves)
        step = self._context(batch, kv, collective)
        for i, layer in enumerate(self._layers):
            gone = watch.gone(stayed.rows, stayed.batch, step.bits)
            if gone:
                stayed.drop(gone, lambda rows: self.batch(rows, kv.block_size))
                if not stayed.rows:
                    break
                step = self._context(stayed.batch, kv, collective)
            last = i + 1 == len(self._layers)
            step.bits = None if last else watch.bits(i, stayed.rows, stayed.batch, hidden.shape[1])
            layer(step, i, stayed.hidden)
        return stayed

    def _context(self, batch: Batch, kv: KvCache, collective: Collective) -> StepContext:
        cos, sin = self._rope.at(batch.positions)
        return StepContext(batch, cos, sin, kv, collective)

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        """This rank's slice of the sampled rows' logits, f32 [sampled, vocab slice]."""
        assert self._norm is not None and self._head is not None, "only the last stage has a head"
        rows = hidden[batch.sampled]
        n = rows.shape[0]
        if self.invariant and n % ROW_TILE:
            rows = torch.cat([rows, rows.new_zeros((ROW_TILE - n % ROW_TILE, rows.shape[1]))])
        logits = self._head(self._norm(rows))[:n].float()
        if self._exact_head is not None:
            self._refine(logits, rows)
        return logits

    def _refine(self, logits: Tensor, rows: Tensor) -> None:
        """Compute the largest ``logits`` f32 [n, vocab] again in f32, in place.

        A bf16 logit near 16 has steps of 0.125: rounding makes ties out of tokens of which one is
        a tenth more likely, and a tie goes to the smaller id.
        """
        assert self._exact_head is not None
        best = logits.topk(min(REFINED, logits.shape[1]), sorted=False).indices
        weights = self._exact_head[best].float()  # [n, REFINED, hidden]
        exact = torch.bmm(weights, self._exact_norm(rows)[:, :, None])
        logits.scatter_(1, best, exact[:, :, 0])
