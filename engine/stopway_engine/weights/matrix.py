"""A weight matrix as it was stored: its values, and its 4-bit codes where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from stopway_engine.parallel import Span

GROUP = 32
"""Columns that share one scale in Q4_0, Q4_1 and Q8_0."""


@dataclass
class Q4:
    """4-bit weights in groups of 32 columns: value = ``codes`` * ``scale`` + ``minimum``.

    ``codes`` uint8 [rows, cols] in 0..15; ``scale`` and ``minimum`` f32 [rows, cols / 32].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The values, f32 [rows, cols]."""
        rows, cols = self.codes.shape
        grouped = self.codes.view(rows, cols // GROUP, GROUP).float()
        return (grouped * self.scale[..., None] + self.minimum[..., None]).view(rows, cols)


@dataclass
class Matrix:
    """``dense`` f32 or bf16 [rows, cols]; ``q4`` is the same matrix where it was stored so."""

    dense: torch.Tensor
    q4: Q4 | None = None


class TensorSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names, without ``model.`` and ``.weight``.

    q and k rows are in the half-split rotary order, whatever the file has.
    """

    def matrix(self, name: str, rows: Span | None = None, cols: Span | None = None) -> Matrix:
        """The slice of a matrix; spans are half open. Raises ``ModelError`` if it isn't there."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """A vector, f32. Raises ``ModelError`` if it isn't there."""
        ...


def stack(*parts: Matrix) -> Matrix:
    """The matrices over one another, so that one kernel call computes them all."""
    dense = torch.cat([part.dense for part in parts])
    codes = [part.q4 for part in parts if part.q4 is not None]
    if len(codes) < len(parts):
        return Matrix(dense)
    return Matrix(
        dense,
        Q4(
            torch.cat([q4.codes for q4 in codes]),
            torch.cat([q4.scale for q4 in codes]),
            torch.cat([q4.minimum for q4 in codes]),
        ),
    )
