"""Prefill to decode, scripted: KV that takes a while to arrive, written off the exec queue.

The prefill group answers one token. Then its cached blocks are lent to the transfer, the decode
group takes as many, and ``transfer_s + transfer_token_s * tokens`` later they are cached there and
the request is submitted with its prompt and that token. A transfer that finds no blocks tries
again every ``RETRY_S``. One that is aborted keeps its blocks, on both sides, until its last byte
would have come: what a peer may still write is not free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopway_core.types import Reason
from stopway_sim.fleet.request import Request
from stopway_sim.fleet.workload import token_at

if TYPE_CHECKING:
    from stopway_sim.fleet.cell import Cell

RETRY_S = 0.005
SPARE_SHARE = 16  # 1/16 of the blocks stays for those who run


class Transfers:
    """All transfers of one pair of groups."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def begin(self, request: Request) -> None:
        """The prefill group is done with ``request``."""
        request.transferring = True
        prompt = self._cell.texts.prompt(request.spec)
        self._cell.groups[0].off_queue.lend(_holder(request), prompt)
        self._take(request, prompt, self._epochs)

    @property
    def _epochs(self) -> tuple[int, int]:
        source, target = self._cell.groups
        return source.epoch, target.epoch

    def _take(self, request: Request, prompt: tuple[int, ...], epochs: tuple[int, int]) -> None:
        cell, cost = self._cell, self._cell.config.cost
        target = cell.groups[1]
        if epochs != self._epochs:
            return
        if request.ended:  # stopped before it had any block there
            self._release(request, 0)
            return
        blocks = len(prompt) // cost.block_size
        spare = cost.blocks // SPARE_SHARE if target.planner.running else 0
        if not target.off_queue.take(_holder(request), blocks, spare=spare):
            cell.tally.counts["transfer_retries"] += 1
            cell.events.at(cell.events.now + RETRY_S, self._take, request, prompt, epochs)
            return
        cell.tally.counts["transfers"] += 1
        seconds = cost.transfer_s + cost.transfer_token_s * len(prompt)
        cell.events.at(cell.events.now + seconds, self._arrived, request, prompt, epochs)

    def _arrived(self, request: Request, prompt: tuple[int, ...], epochs: tuple[int, int]) -> None:
        if epochs != self._epochs:
            return
        cell = self._cell
        source, target = cell.groups
        if request.ended:
            self._release(request, 2 * (len(prompt) // cell.config.cost.block_size))
            return
        request.transferring = False
        target.off_queue.fill(_holder(request), prompt)
        source.off_queue.drop(_holder(request))
        source.freed()
        token = token_at(cell.texts.request_seed(request.spec.number), len(prompt))
        left = request.spec.output - 1
        target.submit(cell.submission(request, (*prompt, token), left), direct=True)

    def abort(self, request: Request) -> None:
        """A stop found the request in neither group but between them."""
        gone = request.spec.disconnect
        reason = Reason.CLIENT_DISCONNECT if gone else Reason.CLIENT_CANCEL
        self._cell.finish(request, reason)

    def lost(self) -> None:
        """One of the groups has lost its epoch: both let go of what transfers held."""
        for request in self._cell.requests.values():
            if request.transferring:
                request.transferring = False
                for group in self._cell.groups:
                    group.off_queue.drop(_holder(request))
                    group.freed()

    def _release(self, request: Request, blocks: int) -> None:
        """An aborted transfer is quiet."""
        cell, now = self._cell, self._cell.events.now
        request.transferring = False
        for group in cell.groups:
            group.off_queue.drop(_holder(request))
            group.freed()
        if request.effective_at:
            cell.giving_up.reclaimed(request, now)
            cell.giving_up.held(request, blocks, now)


def _holder(request: Request) -> tuple[str, int]:
    return ("transfer", request.spec.number)
