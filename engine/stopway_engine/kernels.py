"""Linear layers and norms. One place decides which kernel a matrix uses for how many rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from stopway_engine.numerics import ROW_TILE
from stopway_engine.weights.matrix import GROUP, Q4, Matrix

INT4_ROWS_MAX = 3
"""Up to here the 4-bit kernel wins: it reads a quarter of the bytes, but computes row by row.

Milliseconds for the linear layers of 30 blocks of hidden size 576, two cores with AVX-512 and
bf16, best of several: 4-bit 4.2, 6.6, 11.9 and packed bf16 14.5 (memory bound), 9.8, 11.3 for 1,
4 and 8 rows; the 8-bit kernel lies between them and never wins.
"""


class Linear(Protocol):
    """A matrix that multiplies rows: [n, columns] -> [n, rows of the matrix]."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` in the model's compute dtype; the result has the same."""
        ...


def packs_bf16(device: torch.device) -> bool:
    """Whether oneDNN multiplies packed bf16 matrices here (AVX-512 or AMX)."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def compute_dtype(device: torch.device, *, invariant: bool) -> torch.dtype:
    """What linear layers read and write: bf16 where it is fast, f32 in invariant mode."""
    if invariant:
        return torch.float32
    return torch.bfloat16 if device.type != "cpu" or packs_bf16(device) else torch.float32


class PlainLinear:
    """``torch.nn.functional.linear``: accelerators, and processors without packed kernels."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = weight.to(device=device, dtype=dtype).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight)


class PackedLinear:
    """oneDNN over a matrix in its own layout; twice ``linear``'s speed for few rows."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, rows: int | None = None) -> None:
        weight = weight.to(dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, self._weight, None, "none", [], "")


class SmallBatchLinear:
    """4-bit codes for up to ``INT4_ROWS_MAX`` rows, ``wide`` for more."""

    def __init__(self, q4: Q4, wide: Linear) -> None:
        self._wide = wide
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q4.codes.int(), 1)
        # The kernel computes (code - 8) * scale + zero.
        pair = torch.stack([q4.scale.t(), (q4.minimum + 8.0 * q4.scale).t()], dim=-1)
        self._scales = pair.contiguous().to(torch.bfloat16)
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT4_ROWS_MAX:
            return self._wide(x)
        return self._run(x, self._codes, GROUP, self._scales)


class TiledLinear:
    """Fixed tiles of ``ROW_TILE`` f32 rows: a row's bits do not depend on the other rows.

    A product's shape is always the same, so the kernel sums in the same order; within a tile each
    row has its own accumulators. The number of rows is a multiple of the tile.
    """

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        self._one: Linear
        if device.type == "cpu" and torch.backends.mkldnn.is_available():
            self._one = PackedLinear(weight, torch.float32, ROW_TILE)
        else:
            self._one = PlainLinear(weight, torch.float32, device)

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape[0] % ROW_TILE == 0, "rows are padded to whole tiles"
        if x.shape[0] == ROW_TILE:
            return self._one(x)
        return torch.cat([self._one(tile) for tile in x.split(ROW_TILE)])


def make_linear(matrix: Matrix, device: torch.device, *, invariant: bool) -> Linear:
    """The kernel, or kernels, for ``matrix`` on ``device``."""
    if invariant:
        return TiledLinear(matrix.dense, device)
    dtype = compute_dtype(device, invariant=False)
    if not packs_bf16(device):
        return PlainLinear(matrix.dense, dtype, device)
    wide = PackedLinear(matrix.dense, dtype)
    if matrix.q4 is None or not _int4_fits(matrix.q4):
        return wide
    return SmallBatchLinear(matrix.q4, wide)


def _int4_fits(q4: Q4) -> bool:
    """The 4-bit kernel wants whole tiles of 16 rows; elsewhere bf16 does it all."""
    rows, cols = q4.codes.shape
    return rows % 16 == 0 and cols % GROUP == 0 and "AVX" in torch.backends.cpu.get_cpu_capability()


class RmsNorm:
    """Root-mean-square norm: f32 [n, hidden] -> ``dtype`` [n, hidden], rounded once at the end.

    A few small kernels; ``torch.rms_norm`` has no fused one for CPUs and takes longer.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype, device: torch.device):
        self._weight = weight.to(device)
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if self._dtype == torch.float32:
            # One rounding a kernel: a fused one may round a vector's tail in another way.
            scale = scale.square_().mul_(1.0 / x.shape[-1]).add_(self._eps)
        else:
            scale = torch.addcmul(self._eps, scale, scale, value=1.0 / x.shape[-1])
        return (x * scale.rsqrt_()).mul_(self._weight).to(self._dtype)


def silu_mul(gate_up: Tensor, ffn: int) -> Tensor:
    """``silu(gate) * up`` of [n, 2 * ffn], as [n, ffn]."""
    return functional.silu(gate_up[:, :ffn]).mul_(gate_up[:, ffn:])
