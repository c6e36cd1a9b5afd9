"""The exec half of a rank: runs steps, one at a time, and is the only caller of the model."""

from __future__ import annotations

from pathlib import Path

import torch

from stopway_core.types import RowWork, SamplingParams, StepResult, StepWork
from stopway_engine.batch import build_batch
from stopway_engine.collective import Collective
from stopway_engine.kv import BLOCK_SIZE, KvCache
from stopway_engine.model import Model
from stopway_engine.modelspec import ModelSpec, read_spec
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import ShardSpec, plan_shards
from stopway_engine.sampler import sample


class Executor:
    """Model, KV cache and sampler of one rank.

    All calls come from one thread. Steps run in the order of the calls, which is the same on every
    rank of the group; the token ids of a step are in its work on every rank.
    """

    def __init__(
        self,
        path: Path,
        shard: ShardSpec,
        *,
        numerics: Numerics,
        device: str,
        threads: int,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        collective: Collective,
        spec: ModelSpec | None = None,
    ) -> None:
        """Load the shard (seconds). Raises ``ModelError``.

        ``threads`` is of this process (see ``numerics.threads_for``); ``num_blocks`` is the
        group's agreed number of KV blocks.
        """
        assert threads > 0
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self.spec = spec or read_spec(path)
        self.shard = shard
        self._device = torch.device(device)
        self._collective = collective
        self._model = Model(path, self.spec, shard, numerics, self._device)
        self._kv = KvCache(
            self.spec, shard, num_blocks, block_size, self._model.dtype, self._device
        )
        vocab_spans = [other.vocab for other in plan_shards(self.spec, shard.tp, 1)]
        self._widths = [stop - start for start, stop in vocab_spans]

    @torch.inference_mode()
    def run(self, work: StepWork) -> StepResult | None:
        """Run one step: this rank's part of the forward pass, and the sampling where it samples.

        Returns ``None`` on ranks that do not sample. Raises ``NonFiniteError`` (on the sampling
        rank), and ``RuntimeError`` when another rank is lost.
        """
        shard, model = self.shard, self._model
        batch = build_batch(
            work.rows, self._kv.block_size, model.dtype, self._device, invariant=model.invariant
        )
        if shard.first:
            hidden = model.embed(batch)
        else:
            hidden = self._collective.receive_hidden(batch.padded, self.spec.hidden, self._device)
        hidden = model.forward(batch, hidden, self._kv, self._collective)
        if not shard.last:
            self._collective.send_hidden(hidden)
            return None
        sampled = [row for row in work.rows if row.sample]
        if not sampled:
            return StepResult(work.step, []) if shard.samples else None
        logits = self._collective.gather_logits(model.logits(batch, hidden), self._widths)
        if logits is None:
            return None
        tokens, logprobs = sample(logits, sampled, self.spec.eos)
        return StepResult(work.step, tokens, logprobs)

    def warmup(self, rows_max: int = 32, chunk: int = 256) -> None:
        """Run what a server runs first, so that the first requests don't wait for kernels.

        Writes to block 0: call it before any request. Every rank of the group calls it alike.
        oneDNN compiles a kernel the first time that it sees a number of rows.
        """
        greedy = SamplingParams(temperature=0.0)
        room = self._kv.num_blocks * self._kv.block_size
        chunk = min(chunk, room, self.spec.context)
        sizes = [[chunk], *([1] * n for n in range(1, rows_max + 1))]
        for step, counts in enumerate(sizes):
            rows = [
                RowWork(
                    rid=i,
                    start=0,
                    tokens=[0] * count,
                    blocks=list(range(-(-chunk // self._kv.block_size))),
                    sample=True,
                    params=greedy,
                    history=[0] * count,
                    prompt_len=count,
                )
                for i, count in enumerate(counts)
            ]
            self.run(StepWork(step, rows))

    def close(self) -> None:
        """Leave the group."""
        self._collective.close()
