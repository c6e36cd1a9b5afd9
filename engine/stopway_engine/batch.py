"""The rows of a step as flat arrays: built once with numpy, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stopway_core.types import RowWork
from stopway_engine.numerics import KEY_TILE, QUERY_TILE, ROW_TILE

_BUCKET = 64
"""Decode contexts are padded to multiples of this many positions, so that shapes (for which
oneDNN compiles kernels) repeat from step to step."""


@dataclass
class DecodeGroup:
    """Rows ``first .. first + count - 1`` of the batch, each with a context of its own, of similar
    length: one new token of a request, or one of a request's token and drafts.

    ``blocks`` int64 [count * blocks each]; ``mask`` [count, 1, positions] in the compute dtype is
    0 where the row may look and -inf elsewhere.
    """

    first: int
    count: int
    blocks: Tensor
    mask: Tensor


@dataclass
class Segment:
    """Rows ``first .. first + count - 1`` of the batch: one request's chunk, ending at ``context``.

    ``mask`` [count, context] is ``None`` when the chunk starts at position 0 (plain causal).
    """

    first: int
    count: int
    context: int
    blocks: Tensor
    mask: Tensor | None


@dataclass
class TileGroup:
    """Query tiles of equal key length for the invariant attention.

    ``rows`` int64 [tiles, QUERY_TILE] are batch rows (row 0 where a tile is not full, ignored);
    ``blocks`` int64 [sequences * blocks each], one sequence per tile; ``mask`` f32 [tiles, 1,
    key tiles, QUERY_TILE, KEY_TILE]; ``live`` and ``target`` pick the real rows of the output.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor
    live: Tensor
    target: Tensor


@dataclass
class Batch:
    """A step's rows, flattened: decodes by falling length, then prefill chunks.

    ``n`` real rows, ``padded`` rows with what invariant mode adds. ``tokens`` and ``positions``
    are int64 [padded], ``where`` the KV slots of the real rows, ``sampled`` int64 the batch rows
    whose logits are wanted: of each of the step's rows the last ``samples``, in the step's order.
    ``spans`` are (first batch row, count) of each of the step's rows.
    """

    n: int
    padded: int
    tokens: Tensor
    positions: Tensor
    where: tuple[Tensor, Tensor]
    sampled: Tensor
    spans: list[tuple[int, int]]
    decodes: list[DecodeGroup]
    segments: list[Segment]
    tiles: list[TileGroup]


def build_batch(
    rows: Sequence[RowWork],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
) -> Batch:
    """Flatten ``rows``. Their block tables must cover their positions; ids are not checked."""
    decode = [i for i, row in enumerate(rows) if _decodes_each(row)]
    decode.sort(key=lambda i: -rows[i].start)  # stable: equal lengths keep the step's order
    order = decode + [i for i, row in enumerate(rows) if not _decodes_each(row)]
    counts = np.array([len(rows[i].tokens) for i in order], dtype=np.int64)
    assert counts.size and counts.min() > 0, "a step has rows and a row has tokens"
    firsts = np.concatenate([[0], np.cumsum(counts)])
    n = int(firsts[-1])
    padded = -(-n // ROW_TILE) * ROW_TILE if invariant else n
    tokens, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
    ids, spans = np.empty(n, np.int64), [(0, 0)] * len(rows)
    for first, i in zip(firsts, order, strict=False):
        row, end = rows[i], first + len(rows[i].tokens)
        assert (row.start + end - first - 1) // block_size < len(row.blocks), "table too short"
        tokens[first:end] = row.tokens
        where = np.arange(row.start, row.start + end - first)
        positions[first:end] = where
        low = row.start // block_size
        own = np.array(row.blocks[low : where[-1] // block_size + 1], np.int64)
        ids[first:end] = own[where // block_size - low]
        spans[i] = (int(first), len(row.tokens))
    sampled = [
        first + count - row.samples + i
        for row, (first, count) in zip(rows, spans, strict=True)
        for i in range(row.samples)
    ]

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    batch = Batch(
        n=n,
        padded=padded,
        tokens=put(tokens),
        positions=put(positions),
        where=(put(ids), put(positions[:n] % block_size)),
        sampled=put(np.array(sampled, np.int64)),
        spans=spans,
        decodes=[],
        segments=[],
        tiles=[],
    )
    ordered = [rows[i] for i in order]
    if invariant:
        batch.tiles = _tiles(ordered, firsts, block_size, device)
    else:
        batch.decodes = _decodes(ordered[: len(decode)], block_size, dtype, device)
        batch.segments = [
            _segment(row, int(first), block_size, dtype, device)
            for row, first in zip(ordered[len(decode) :], firsts[len(decode) :], strict=False)
        ]
    return batch


def _decodes_each(row: RowWork) -> bool:
    """Whether every token of the row is looked at as a decode of its own.

    A few drafts among other rows are much cheaper so than as a chunk with its own attention.
    """
    return len(row.tokens) in (1, row.samples)


def _table(rows: Sequence[RowWork], contexts: Sequence[int], block_size: int, width: int) -> Tensor:
    """Block tables, int64 [rows * width]; a short one is filled up with its own first block.

    The filling is masked; it must be the request's own, so that no value of another one, not
    even a NaN, is ever multiplied.
    """
    table = np.empty((len(rows), width), np.int64)
    for i, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        used = -(-context // block_size)
        table[i, :used] = row.blocks[:used]
        table[i, used:] = row.blocks[0]
    return torch.from_numpy(table.reshape(-1))


def _decodes(
    rows: Sequence[RowWork], block_size: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    """Groups in which the shortest context is about half of the longest, or more."""
    step = int(np.lcm(_BUCKET, block_size))
    lanes = [(row, row.start + i + 1) for row in rows for i in range(len(row.tokens))]
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(lanes):
        width = -(-lanes[first][1] // step) * step
        end = first + 1
        while end < len(lanes) and lanes[end][1] * 2 > width - step:
            end += 1
        contexts = [context for _, context in lanes[first:end]]
        width = -(-max(contexts) // step) * step  # of a request's drafts the last is the longest
        owners = [row for row, _ in lanes[first:end]]
        blocks = _table(owners, contexts, block_size, width // block_size)
        allowed = np.arange(width)[None, :] < np.array(contexts)[:, None]
        mask = np.where(allowed, np.float32(0), np.float32(-np.inf))
        groups.append(
            DecodeGroup(
                first,
                end - first,
                blocks.to(device),
                torch.from_numpy(mask)[:, None].to(device=device, dtype=dtype),
            )
        )
        first = end
    return groups


def _segment(
    row: RowWork, first: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Segment:
    count, context = len(row.tokens), row.start + len(row.tokens)
    blocks = _table([row], [context], block_size, -(-context // block_size)).to(device)
    if row.start == 0:
        return Segment(first, count, context, blocks, None)
    mask = torch.full((count, context), -torch.inf, dtype=dtype, device=device)
    return Segment(first, count, context, blocks, mask.triu_(row.start + 1))


def _tiles(
    rows: Sequence[RowWork], firsts: np.ndarray, block_size: int, device: torch.device
) -> list[TileGroup]:
    """One group for all one-token rows of a key length, one for each tile of a longer chunk."""
    assert KEY_TILE % block_size == 0, "invariant mode wants a block size that divides 64"
    decodes: dict[int, list[int]] = {}
    groups: list[TileGroup] = []
    for i, row in enumerate(rows):
        if len(row.tokens) == 1:
            decodes.setdefault(-(-(row.start + 1) // KEY_TILE), []).append(i)
            continue
        for begin in range(0, len(row.tokens), QUERY_TILE):
            count = min(QUERY_TILE, len(row.tokens) - begin)
            span = [(row, row.start + begin, int(firsts[i]) + begin, count)]
            groups.append(_tile_group(span, block_size, device))
    for members in decodes.values():
        spans = [(rows[i], rows[i].start, int(firsts[i]), 1) for i in members]
        groups.append(_tile_group(spans, block_size, device))
    return groups


def _tile_group(
    spans: Sequence[tuple[RowWork, int, int, int]], block_size: int, device: torch.device
) -> TileGroup:
    """``spans`` are (row, first position, first batch row, count), all of one key length."""
    contexts = [start + count for _, start, _, count in spans]
    key_tiles = -(-max(contexts) // KEY_TILE)
    width = key_tiles * KEY_TILE
    lane = np.arange(QUERY_TILE)
    live = np.array([lane < count for _, _, _, count in spans])
    batch_rows = np.array([first + lane for _, _, first, _ in spans]) * live
    position = np.array([start + np.minimum(lane, count - 1) for _, start, _, count in spans])
    allowed = np.arange(width)[None, None, :] <= position[:, :, None]
    mask = np.where(allowed, np.float32(0), np.float32(-np.inf))
    mask = mask.reshape(len(spans), 1, QUERY_TILE, key_tiles, KEY_TILE).swapaxes(2, 3)
    return TileGroup(
        rows=torch.from_numpy(batch_rows).to(device),
        blocks=_table([span[0] for span in spans], contexts, block_size, width // block_size).to(
            device
        ),
        mask=torch.from_numpy(np.ascontiguousarray(mask)).to(device),
        live=torch.from_numpy(np.flatnonzero(live)).to(device),
        target=torch.from_numpy(batch_rows[live]).to(device),
    )
