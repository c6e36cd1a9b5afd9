"""The paged KV cache of one rank: block ids come from outside, this only has the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stopway_engine.kernels import compute_dtype
from stopway_engine.modelspec import ModelSpec
from stopway_engine.numerics import Numerics
from stopway_engine.parallel import ShardSpec

BLOCK_SIZE = 16
"""Positions in a block."""


class KvCache:
    """Keys and values of every layer of a stage.

    ``layers[i]`` is [blocks, 2 * kv_heads, block_size, head_dim], keys before values: in one layer
    a block is one run of memory, and one head's positions within it are one run, which is what
    the decode kernels read. Slots that were never written are zero.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: ShardSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.n_kv_heads = shard.n_kv_heads
        self.head_dim = spec.head_dim
        shape = (num_blocks, 2 * shard.n_kv_heads, block_size, spec.head_dim)
        self.layers = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(shard.n_layers)
        ]
        # [blocks, block_size, 2 * kv_heads, head_dim], so that one (block, offset) is one position
        self._by_position = [layer.permute(0, 2, 1, 3) for layer in self.layers]

    def write(self, layer: int, where: tuple[Tensor, Tensor], kv: Tensor) -> None:
        """Store ``kv`` [n, 2 * kv_heads, head_dim] at ``where``: block ids, offsets, int64 [n]."""
        self._by_position[layer].index_put_(where, kv)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer, as if one pair came after the other."""
        if not pairs:
            return
        origin: dict[int, int] = {}
        for source, target in pairs:
            origin[target] = origin.get(source, source)
        device = self.layers[0].device
        sources = torch.tensor(list(origin.values()), dtype=torch.int64, device=device)
        targets = torch.tensor(list(origin), dtype=torch.int64, device=device)
        for layer in self.layers:
            layer.index_copy_(0, targets, layer.index_select(0, sources))

    def read(self, layer: int, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values of block tables of equal length.

        ``blocks`` is int64 [sequences * blocks each]. Returns two tensors [kv_heads, sequences,
        positions, head_dim], each head of each sequence contiguous.
        """
        found = self.layers[layer].index_select(0, blocks).transpose(0, 1).contiguous()
        found = found.view(2, self.n_kv_heads, sequences, -1, self.head_dim)
        return found[0], found[1]


def kv_bytes_per_block(
    spec: ModelSpec,
    shard: ShardSpec,
    numerics: Numerics,
    device: str = "cpu",
    block_size: int = BLOCK_SIZE,
) -> int:
    """Bytes of one block over all layers of the rank."""
    dtype = compute_dtype(torch.device(device), invariant=numerics is Numerics.INVARIANT)
    per_position = 2 * shard.n_kv_heads * spec.head_dim * dtype.itemsize
    return shard.n_layers * block_size * per_position


def choose_num_blocks(
    spec: ModelSpec,
    shard: ShardSpec,
    numerics: Numerics,
    memory_bytes: int,
    device: str = "cpu",
    block_size: int = BLOCK_SIZE,
) -> int:
    """Blocks that fit into ``memory_bytes``, but enough for one sequence of the whole context."""
    one_sequence = -(-spec.context // block_size)
    each = kv_bytes_per_block(spec, shard, numerics, device, block_size)
    return max(one_sequence, memory_bytes // each)
