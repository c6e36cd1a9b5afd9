"""The data channel between ranks: sums over a TP group, hidden states from stage to stage.

Only the exec thread calls this. Every rank issues its calls in the order of the steps, and a step
waits only for earlier stages or earlier steps, so no two ranks can wait for one another.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stopway_engine.parallel import ShardSpec


class Collective(Protocol):
    """What a rank's model needs of the other ranks. A failure raises ``RuntimeError``."""

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` f32 over the TP group, in place."""
        ...

    def gather_logits(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """``x`` f32 [n, own width] of each TP rank, joined [n, sum of widths] at TP 0 only."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """``x`` of TP 0 to the other ranks of the TP group, in place."""
        ...

    def receive_hidden(self, n: int, width: int, device: torch.device) -> Tensor:
        """The residual f32 [n, width] from the same TP index of the stage before."""
        ...

    def send_hidden(self, x: Tensor) -> None:
        """Send the residual f32 [n, width] on to the next stage; returns before it has arrived."""
        ...

    def close(self) -> None:
        """Let the last sends finish, then leave the groups."""
        ...


class LocalCollective:
    """A group of one rank: nothing to exchange."""

    def all_reduce(self, x: Tensor) -> None:
        """See ``Collective``."""

    def gather_logits(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """See ``Collective``."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """See ``Collective``."""

    def receive_hidden(self, n: int, width: int, device: torch.device) -> Tensor:
        """Never called: the first stage embeds."""
        raise AssertionError("a single stage receives nothing")

    def send_hidden(self, x: Tensor) -> None:
        """Never called: the last stage samples."""
        raise AssertionError("a single stage sends nothing")

    def close(self) -> None:
        """See ``Collective``."""


class TorchCollective:
    """``torch.distributed`` over gloo (processors) or nccl (GPUs).

    ``ordered`` sums in rank order: a ring's order depends on an element's offset, which would make
    a row depend on its place in the batch (with two ranks it can't, a + b being b + a).
    """

    def __init__(
        self,
        shard: ShardSpec,
        tp_group: dist.ProcessGroup | None,
        before: dist.ProcessGroup | None,
        after: dist.ProcessGroup | None,
        *,
        ordered: bool,
    ) -> None:
        self._shard = shard
        self._tp_group, self._before, self._after = tp_group, before, after
        self._ordered = ordered and shard.tp > 2
        # The two latest sends: a buffer is let go when its send is two steps old and done.
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def all_reduce(self, x: Tensor) -> None:
        """See ``Collective``."""
        if self._tp_group is None:
            return
        if not self._ordered:
            dist.all_reduce(x, group=self._tp_group)
            return
        parts = [torch.empty_like(x) for _ in range(self._shard.tp)]
        dist.all_gather(parts, x, group=self._tp_group)
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)

    def gather_logits(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """See ``Collective``. Slices are padded to the widest, as ``gather`` wants equal ones."""
        if self._tp_group is None:
            return x
        widest = max(widths)
        padded = x.new_zeros((x.shape[0], widest))
        padded[:, : x.shape[1]] = x
        root = self._shard.stage * self._shard.tp
        if self._shard.tp_index:
            dist.gather(padded, None, dst=root, group=self._tp_group)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=root, group=self._tp_group)
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def broadcast(self, x: Tensor) -> None:
        """See ``Collective``."""
        if self._tp_group is not None:
            dist.broadcast(x, src=self._shard.stage * self._shard.tp, group=self._tp_group)

    def receive_hidden(self, n: int, width: int, device: torch.device) -> Tensor:
        """See ``Collective``."""
        assert self._before is not None, "the first stage receives nothing"
        hidden = torch.empty((n, width), dtype=torch.float32, device=device)
        dist.recv(hidden, src=self._shard.rank - self._shard.tp, group=self._before)
        return hidden

    def send_hidden(self, x: Tensor) -> None:
        """See ``Collective``; waits only when both buffers are still under way."""
        assert self._after is not None, "the last stage sends nothing"
        if len(self._sends) == 2:
            self._sends.pop(0)[0].wait()
        work = dist.isend(x, dst=self._shard.rank + self._shard.tp, group=self._after)
        assert work is not None, "this rank is in the group"
        self._sends.append((work, x))

    def close(self) -> None:
        """See ``Collective``."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        dist.destroy_process_group()


def connect(
    shard: ShardSpec,
    *,
    store_host: str,
    store_port: int,
    backend: str,
    timeout_s: float,
    ordered: bool,
) -> Collective:
    """Join the group; returns when every rank has. Rank 0 serves the store.

    Every rank makes every process group, in one order: the TP group of each stage, then each pair
    of ranks across each stage boundary. Raises ``RuntimeError`` (``dist.DistError`` among them)
    when a rank does not come within ``timeout_s``, which then also bounds every later call.
    """
    if shard.world == 1:
        return LocalCollective()
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        store_host, store_port, shard.world, is_master=shard.rank == 0, timeout=timeout
    )
    dist.init_process_group(
        backend, store=store, rank=shard.rank, world_size=shard.world, timeout=timeout
    )
    tp, pp = shard.tp, shard.pp
    tp_groups = [
        _new_group(list(range(stage * tp, (stage + 1) * tp)), timeout)
        for stage in range(pp if tp > 1 else 0)
    ]
    pairs = {
        (stage, t): _new_group([stage * tp + t, (stage + 1) * tp + t], timeout)
        for stage in range(pp - 1)
        for t in range(tp)
    }
    return TorchCollective(
        shard,
        tp_groups[shard.stage] if tp > 1 else None,
        pairs.get((shard.stage - 1, shard.tp_index)),
        pairs.get((shard.stage, shard.tp_index)),
        ordered=ordered,
    )


def _new_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """A group of ``ranks``; ``None`` where this rank is not one of them."""
    group = dist.new_group(ranks, timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None
