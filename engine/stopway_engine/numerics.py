"""Numeric modes and the thread settings that go with them. No torch import.

``fast`` picks the kernel of a linear layer by the number of rows in the step, so a row's last
bits depend on its neighbours. ``invariant`` runs every reduction in a fixed shape and order, so
that a row's result depends on its own tokens only (with a fixed number of threads).
"""

from __future__ import annotations

import os
from enum import StrEnum

ROW_TILE = 8
"""Rows in one call of an invariant linear layer; fewer rows are padded."""

QUERY_TILE = 8
"""Query positions of one request in one call of the invariant attention."""

KEY_TILE = 64
"""Key positions reduced at once by the invariant attention; a multiple of the block size."""


class Numerics(StrEnum):
    """How results may depend on the batch."""

    FAST = "fast"
    INVARIANT = "invariant"


class NonFiniteError(ArithmeticError):
    """The model produced logits without a finite maximum: no token can be chosen."""


def threads_for(ranks: int, numerics: Numerics, cores: int | None = None) -> int:
    """Compute threads of each of ``ranks`` processes that share this machine's cores.

    More threads than cores make everything wait. In ``invariant`` mode the number is rounded
    down to a power of two, so that the slices which elementwise kernels give to threads are whole
    vectors (a scalar tail may round ``exp`` differently).
    """
    cores = cores or len(os.sched_getaffinity(0))
    threads = max(1, cores // max(1, ranks))
    if numerics is Numerics.INVARIANT:
        threads = 1 << (threads.bit_length() - 1)
    return threads


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a rank process, to be set before it imports torch.

    OpenMP's threads spin a few microseconds between two kernels of a step and then sleep: waking
    them each time doubles a decode step, while spinning for long (libgomp's default is several
    milliseconds) takes the core from the control thread and from the other processes.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "20000" if threads > 1 else "0",
        "KMP_BLOCKTIME": "0",
    }
