"""Rows that leave a step between two layers, since their request has ended meanwhile.

A long prefill then ends within a layer or two of its stop instead of at its end. The stop itself
still takes effect in its turn; what is saved is work whose result nobody would read.

With tensor parallelism all ranks of a stage must leave a row at the same layer, as their sums have
one shape. So a rank only says which of its rows it knows to be dead, in one row more of a sum that
the layer makes anyway; whom the sum names leaves, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stopway_core.leaving import SHARED_ROWS_MIN, pays
from stopway_core.types import RowWork
from stopway_engine.batch import Batch

CUDA_EVERY = 8
"""On CUDA reading a sum waits for the device, so that its queue runs dry: one in so many layers."""


@dataclass
class Stayed:
    """What is left of a step: ``batch`` of ``rows``, its residual, and where the rows were.

    ``hidden`` is f32 [batch.padded, hidden]; ``places`` are the indexes of ``rows`` among those
    that the step began with. Once no rows are left, ``batch`` and ``hidden`` mean nothing.
    """

    rows: list[RowWork]
    batch: Batch
    hidden: Tensor
    places: list[int]

    def drop(self, gone: set[int], rebuild: Callable[[Sequence[RowWork]], Batch]) -> None:
        """Take the rows at the indexes ``gone`` out; the others keep their residual."""
        stay = [i for i in range(len(self.rows)) if i not in gone]
        spans = [self.batch.spans[i] for i in stay]
        self.rows = [self.rows[i] for i in stay]
        self.places = [self.places[i] for i in stay]
        if not stay:
            return
        self.batch = rebuild(self.rows)
        origin = np.zeros(self.batch.padded, np.int64)  # what pads is never looked at
        for (old, count), (new, _) in zip(spans, self.batch.spans, strict=True):
            origin[new : new + count] = np.arange(old, old + count)
        self.hidden = self.hidden[torch.from_numpy(origin).to(self.hidden.device)]

    def spread(self, whole: Batch) -> Tensor:
        """The residual as the next stage expects it, f32 [whole.padded, hidden].

        ``whole`` is the batch that the step began with; rows that left are zeros.
        """
        if len(self.rows) == len(whole.spans):
            return self.hidden
        full = self.hidden.new_zeros((whole.padded, self.hidden.shape[1]))
        for i, place in enumerate(self.places):
            (new, count), (old, _) = self.batch.spans[i], whole.spans[place]
            full[old : old + count] = self.hidden[new : new + count]
        return full


class Watch:
    """Looks, between layers, for rows whose request has ended."""

    def __init__(self, tp: int, device: torch.device, *, leaves: bool = True) -> None:
        """``leaves`` False: nobody looks, and every row stays to the end of its step."""
        self._leaves = leaves
        self._alone = tp == 1
        # Alone there is nothing to read back, but on CUDA the layers were queued long before they
        # run: there it is the step's first layers that see a stop.
        self._every = CUDA_EVERY if device.type == "cuda" else 1

    def gone(self, rows: Sequence[RowWork], batch: Batch, bits: Tensor | None) -> set[int]:
        """Indexes of the rows that leave now; none where leaving would not pay.

        ``bits`` are those of the layer before, summed.
        """
        if not self._leaves:
            return set()
        if self._alone:
            dead = {i for i, row in enumerate(rows) if not row.pulse.beats}
        elif bits is not None:
            dead = set(torch.nonzero(bits[0, : len(rows)]).flatten().tolist())
        else:
            return set()
        tokens = sum(batch.spans[i][1] for i in dead)
        return dead if pays(tokens, batch.n) else set()

    def bits(self, layer: int, rows: Sequence[RowWork], batch: Batch, width: int) -> Tensor | None:
        """What this rank says to the others of its stage: f32 [1, width], 1 for a dead row.

        ``None`` where it says nothing; this depends on what is the same on all of them. Rows
        beyond ``width`` cannot be named, and stay.
        """
        if (
            not self._leaves
            or self._alone
            or batch.n < SHARED_ROWS_MIN
            or (layer + 1) % self._every
        ):
            return None
        dead = [i for i, row in enumerate(rows[:width]) if not row.pulse.beats]
        bits = torch.zeros((1, width), dtype=torch.float32)
        bits[0, dead] = 1.0
        return bits.to(batch.tokens.device)
