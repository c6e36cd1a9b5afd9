"""The real model's first layers: a row's bits in invariant mode, and fast mode against it."""

import random
from dataclasses import replace

import pytest
import torch

from stopway_core.types import RowWork, SamplingParams
from stopway_engine.collective import LocalCollective
from stopway_engine.kv import BLOCK_SIZE, KvCache, choose_num_blocks, kv_bytes_per_block
from stopway_engine.model import Model
from stopway_engine.modelspec import read_spec, resolve_model
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import plan_shards

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
TOKENS = [random.Random(1).randrange(1000, 40000) for _ in range(150)]


class Rig:
    """A model, a cache and a forward pass that returns every sampled row's logits."""

    def __init__(self, numerics: Numerics) -> None:
        path = resolve_model("builtin:smollm2")
        self.spec = replace(read_spec(path), n_layers=5)  # real weights, a sixth of the time
        self.shard = plan_shards(self.spec, 1, 1)[0]
        self.model = Model(path, self.spec, self.shard, numerics, CPU)
        self.kv = KvCache(self.spec, self.shard, 300, BLOCK_SIZE, self.model.dtype, CPU)

    @torch.inference_mode()
    def run(self, rows: list[RowWork]) -> torch.Tensor:
        model = self.model
        batch = model.batch(rows, BLOCK_SIZE)
        left = model.forward(rows, batch, model.embed(batch), self.kv, LocalCollective())
        assert left.batch is batch and left.places == list(range(len(rows)))
        return model.logits(batch, left.hidden)

    def sequence(self, chunks: list[int], neighbours: int = 0, seed: int = 0) -> list[torch.Tensor]:
        """Logits after each chunk of ``TOKENS``, beside random rows, in random blocks and order."""
        rng = random.Random(seed)
        blocks, position, out = rng.sample(range(10), 10), 0, []
        for chunk in chunks:
            rows = [work(-1, position, TOKENS[position : position + chunk], blocks)]
            for i in range(neighbours):
                count = rng.choice([1, 1, 3, 20, 33])
                tokens = [rng.randrange(1000, 40000) for _ in range(count)]
                own = range(10 + 10 * i, 20 + 10 * i)
                rows.append(work(i, rng.choice([0, 50, 100]), tokens, list(own)))
            rng.shuffle(rows)
            logits = self.run(rows)
            out.append(logits[[row.rid for row in rows].index(-1)])
            position += chunk
        return out


def work(rid: int, start: int, tokens: list[int], blocks: list[int]) -> RowWork:
    return RowWork(rid, start, tokens, blocks, 1, GREEDY, tokens, 1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A busy machine makes threads that wait for each other very slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def invariant(one_thread):
    return Rig(Numerics.INVARIANT)


@pytest.fixture(scope="module")
def fast(one_thread):
    return Rig(Numerics.FAST)


@pytest.fixture(scope="module")
def reference(invariant):
    """Logits of the last position: one prefill of everything, alone."""
    return invariant.sequence([150])[-1]


@pytest.mark.parametrize(
    ("chunks", "neighbours"),
    [
        ([149, 1], 0),
        ([150], 5),
        ([7] * 21 + [3], 1),
        ([64, 64, 22], 4),
        ([140] + [1] * 10, 2),
        ([149, 1], 12),
    ],
)
def test_invariant_logits_do_not_depend_on_chunks_or_neighbours(
    invariant, reference, chunks, neighbours
):
    found = invariant.sequence(chunks, neighbours, seed=len(chunks))[-1]
    assert torch.equal(found, reference)


def test_invariant_logits_of_every_position_are_those_of_a_decode(invariant):
    decoded = invariant.sequence([1] * 20, neighbours=1)
    for length in (2, 8, 9, 17, 20):
        assert torch.equal(invariant.sequence([length])[-1], decoded[length - 1])


def test_drafts_have_the_logits_of_decodes(invariant, fast):
    for rig in (invariant, fast):
        decoded = torch.stack(rig.sequence([30, *[1] * 5])[1:])
        blocks = list(range(4))
        rig.run([work(1, 0, TOKENS[:30], blocks)])
        row = work(1, 30, TOKENS[30:35], blocks)
        row.samples = 5
        other = work(2, 3, [9], [20])
        found = rig.run([other, row])[1:]
        if rig is invariant:
            assert torch.equal(found, decoded)
        else:
            assert (found - decoded).norm() < 0.1 * decoded.norm()


def test_blocks_are_copied_one_pair_after_the_other(invariant):
    kv = KvCache(invariant.spec, invariant.shard, 6, BLOCK_SIZE, torch.float32, CPU)
    for layer in kv.layers:
        layer.copy_(torch.randn(layer.shape))
    expected = [layer.clone() for layer in kv.layers]
    pairs = [(0, 1), (1, 2), (3, 0), (4, 5)]
    for layer in expected:
        for source, target in pairs:
            layer[target] = layer[source]
    kv.copy(pairs)
    kv.copy([])
    for found, layer in zip(kv.layers, expected, strict=True):
        assert torch.equal(found, layer)


def test_two_threads_are_invariant_too(invariant):
    torch.set_num_threads(2)
    whole = invariant.sequence([40])[-1]
    assert torch.equal(invariant.sequence([30, 9, 1], neighbours=3)[-1], whole)
    torch.set_num_threads(1)


@pytest.mark.parametrize("chunks", [[150], [1] * 5, [40, 2, 1, 60]])
@pytest.mark.parametrize("neighbours", [0, 2, 6])
def test_fast_logits_are_close(fast, invariant, chunks, neighbours):
    expected = invariant.sequence(chunks)[-1]
    found = fast.sequence(chunks, neighbours, seed=3)[-1]
    # Rounding to bf16, and 4-bit scales to bf16; a wrong mask or position changes it all.
    expected, found = expected - expected.mean(), found - found.mean()
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_blocks_are_counted_in_the_cache_dtype(invariant):
    spec, shard = invariant.spec, invariant.shard
    each = kv_bytes_per_block(spec, shard, Numerics.INVARIANT)
    cache = sum(layer.numel() * layer.element_size() for layer in invariant.kv.layers)
    assert each * invariant.kv.num_blocks == cache == each * 300
    assert choose_num_blocks(spec, shard, Numerics.INVARIANT, 1000 * each) == 1000
    assert choose_num_blocks(spec, shard, Numerics.INVARIANT, 0) == spec.context // BLOCK_SIZE
