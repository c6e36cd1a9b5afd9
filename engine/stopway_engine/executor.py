"""The exec half of a rank: runs steps, one at a time, and is the only caller of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from stopway_core.types import (
    DROPPED,
    NO_SOURCE,
    RowWork,
    SamplingParams,
    StepResult,
    StepWork,
)
from stopway_engine.collective import Collective
from stopway_engine.grammar.matchers import GrammarTable, Matchers
from stopway_engine.kv import BLOCK_SIZE, KvCache
from stopway_engine.model import Model
from stopway_engine.modelspec import ModelSpec, read_spec
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import ShardSpec, plan_shards
from stopway_engine.verify import Kept, result_of, sample_rows

SOURCE_STEPS = 4
"""How many steps' sampled ids are kept: a row's source is one of the latest steps."""


class Executor:
    """Model, KV cache and sampler of one rank.

    All calls come from one thread. Steps run in the order of the calls, which is the same on every
    rank of the group. The token ids of a step are in its work on every rank, or, with ``overlap``,
    in what an earlier step has sampled.
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
        overlap: bool = False,
        leaves: bool = True,
        grammars: GrammarTable | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        """Load the shard (seconds). Raises ``ModelError``.

        ``threads`` is of this process (see ``numerics.threads_for``); ``num_blocks`` is the
        group's agreed number of KV blocks. With ``overlap`` (on all ranks alike, and of a single
        stage) rows may have a source; with ``leaves`` (likewise) those of ended requests leave the
        step that runs. ``grammars`` are wanted on the rank that samples.
        """
        assert threads > 0
        assert not overlap or shard.pp == 1, "only a single stage has the token that it sampled"
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self.spec = spec or read_spec(path)
        self.shard = shard
        self._device = torch.device(device)
        self._collective = collective
        self._model = Model(path, self.spec, shard, numerics, self._device, leaves=leaves)
        self._kv = KvCache(
            self.spec, shard, num_blocks, block_size, self._model.dtype, self._device
        )
        vocab_spans = [other.vocab for other in plan_shards(self.spec, shard.tp, 1)]
        self._widths = [stop - start for start, stop in vocab_spans]
        self._overlap = overlap
        self._sampled: dict[int, list[int]] = {}  # of the latest steps, by step
        self._matchers = None
        if shard.samples and grammars is not None:
            self._matchers = Matchers(grammars, self.spec.vocab)

    @torch.inference_mode()
    def run(self, work: StepWork) -> StepResult | None:
        """Run one step: this rank's part of the forward pass, and the sampling where it samples.

        Returns ``None`` on ranks that do not sample. Raises ``NonFiniteError`` (on the sampling
        rank), and ``RuntimeError`` when another rank is lost.
        """
        assert work.rows, "a step has rows"
        self._kv.copy(work.copies)
        if self._matchers is not None:
            self._matchers.leave(work.left)
        kept = self._compute(work)
        result = result_of(work.step, work.rows, kept) if self.shard.samples else None
        if self._overlap:
            self._share(work, result, sampled=bool(kept))
        return result

    def _compute(self, work: StepWork) -> dict[int, Kept]:
        """What the rows of ``work`` have got, by their index: those that stayed and sample.

        On ranks that do not sample these rows have empty entries.
        """
        shard, model = self.shard, self._model
        rows, places = self._feed(work.rows)
        if not rows:
            return {}
        batch = model.batch(rows, self._kv.block_size)
        if shard.first:
            hidden = model.embed(batch)
        else:
            hidden = self._collective.receive_hidden(batch.padded, self.spec.hidden, self._device)
        stayed = model.forward(rows, batch, hidden, self._kv, self._collective)
        if not shard.last:
            self._collective.send_hidden(stayed.spread(batch))
            return {}
        sampling = [i for i, row in enumerate(stayed.rows) if row.samples]
        if not sampling:
            return {}
        logits = model.logits(stayed.batch, stayed.hidden)
        kept = self._sample(logits, [stayed.rows[i] for i in sampling])
        return {places[stayed.places[i]]: found for i, found in zip(sampling, kept, strict=True)}

    def _feed(self, rows: Sequence[RowWork]) -> tuple[list[RowWork], list[int]]:
        """The rows to compute, each with the token of its source, and their indexes.

        A row whose source has no token has none to feed, and is left out.
        """
        fed, places = [], []
        for i, row in enumerate(rows):
            if row.source != NO_SOURCE:
                assert self._overlap, "a row with a source needs a group that overlaps its steps"
                step, index = row.source
                token = self._sampled[step][index]
                if token < 0:
                    continue
                row = replace(row, tokens=[token])
            fed.append(row)
            places.append(i)
        return fed, places

    def _sample(self, logits: Tensor, rows: Sequence[RowWork]) -> list[Kept]:
        """``logits`` is this rank's slice, f32 [samples, vocab slice]."""
        whole = self._collective.gather_logits(logits, self._widths)
        if whole is None:
            return [Kept([], []) for _ in rows]
        return sample_rows(whole, rows, self.spec.eos, self._matchers)

    def _share(self, work: StepWork, result: StepResult | None, *, sampled: bool) -> None:
        """The step's last operation: give every rank the last token of each row that samples.

        Which rows stayed is agreed, so all ranks know alike whether anything was ``sampled``.
        """
        count = sum(row.samples > 0 for row in work.rows)
        if not count:
            return
        tokens = [DROPPED] * count
        if sampled:
            if result is not None:
                ends = accumulate(result.counts or [1] * count)
                tokens = [result.tokens[end - 1] for end in ends]
            if self.shard.tp > 1:
                shared = torch.tensor(tokens, dtype=torch.int64, device=self._device)
                self._collective.broadcast(shared)
                tokens = shared.tolist()
        self._sampled[work.step] = tokens
        if len(self._sampled) > SOURCE_STEPS:
            del self._sampled[next(iter(self._sampled))]

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
                    samples=1,
                    params=greedy,
                    history=[0] * count,
                    prompt_len=count,
                )
                for i, count in enumerate(counts)
            ]
            self.run(StepWork(step, rows))
        self._sampled.clear()  # those steps' numbers will come again

    def close(self) -> None:
        """Leave the group."""
        self._collective.close()
