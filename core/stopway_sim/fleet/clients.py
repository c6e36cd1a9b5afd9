"""Clients: how they give up, and how those of a closed loop go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stopway_core.types import Reason, Stop, Target
from stopway_sim.fleet.events import START_S
from stopway_sim.fleet.request import Request
from stopway_sim.fleet.workload import Drawer, Spec, Storm, stream

if TYPE_CHECKING:
    from stopway_sim.fleet.cell import Cell

_STORM = 6


class GivingUp:
    """From a client's act (its cancel, or its going away) to the blocks' return.

    The gateway issues a stop for a cancel at once, for a disconnect when the policy's detection
    sees it; not at all when the whole answer had been delivered by then. The stop goes to every
    group of the cell, by Redis, or past it after ``resend_s`` while Redis is down.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def begin(self) -> None:
        """Set the storms' times."""
        for index, storm in enumerate(self._cell.workload.storms):
            self._cell.events.at(START_S + storm.at_s, self._storm, index, storm)

    def arrived(self, request: Request) -> None:
        """A request is there: its client may give it up after a while."""
        after = request.spec.cancel_after_s
        if after is not None:
            self._cell.events.at(request.sent_at + after, self.act, request)

    def act(self, request: Request) -> None:
        """The client gives up now, unless it has its whole answer or has given up before."""
        if request.ended or request.acted_at:
            return
        cell, now = self._cell, self._cell.events.now
        request.acted_at = now
        request.delivered_at_act = request.produced
        request.prefill_at_act = request.prefilled
        cell.tally.counts["given_up"] += 1
        gone = request.spec.disconnect
        detection_s = cell.outside.detection_s(now - request.sent_at) if gone else 0.0
        request.issued_at = now + detection_s
        cell.events.at(request.issued_at, self._issue, request)
        cell.closed.next(request.spec, now)

    def _storm(self, index: int, storm: Storm) -> None:
        seed = self._cell.texts.seed
        for number, request in list(self._cell.alive.items()):
            if stream(seed, _STORM, (index << 32) | number).random() < storm.share:
                self.act(request)

    def _issue(self, request: Request) -> None:
        cell, now = self._cell, self._cell.events.now
        cell.tally.series["detect"].append(now - request.acted_at)
        if request.ended:
            cell.tally.counts["stops_too_late"] += 1
            return
        cell.tally.counts["stops_issued"] += 1
        number = request.spec.number
        stop = Stop(
            stop_id=f"s{number}",
            target=Target(uids=(f"r{number}",)),
            reason=Reason.CLIENT_DISCONNECT if request.spec.disconnect else Reason.CLIENT_CANCEL,
            tenant="sim",
            admin=False,
            issued_at=now,
        )
        cost, since = cell.config.cost, now - START_S
        down = any(start <= since < end for start, end in cell.config.redis_down)
        delay = cost.resend_s + cost.gateway_s if down else cost.redis_s
        for group in cell.groups:
            group.stop(stop, delay)

    def noticed(self, request: Request) -> None:
        """A leader has the stop; the first that has it counts."""
        if not request.noticed_at:
            request.noticed_at = self._cell.events.now
            if not request.ended:
                self._series("notify", request, request.noticed_at)
            if request.transferring and self._cell.transfers:
                self._cell.transfers.abort(request)

    def ended(self, request: Request, reason: Reason) -> None:
        """It has its outcome; when that is its stop's, the stop took effect now."""
        if reason in (Reason.CLIENT_CANCEL, Reason.CLIENT_DISCONNECT):
            request.effective_at = self._cell.events.now
            self._series("effective", request, request.effective_at)

    def receipt(self, request: Request, receipt: dict[str, Any]) -> None:
        """A group is done with the stop."""
        if receipt["status"] == "already_finished":
            # Else it is a leg that has finished, of a request that lives or was stopped later.
            if request.ended and not request.effective_at and not request.answered:
                request.answered = True
                self._cell.tally.counts["stops_already_finished"] += 1
        elif receipt["outcome"]["stopped"] and request.effective_at:
            blocks = receipt["blocks_reclaimed"] + receipt["blocks_cached"]
            at = receipt["ranks"][0]["reclaimed_at"]
            # Without a fence the engine gives them to anything at once: that is the hazard.
            self.reclaimed(request, at if self._cell.outside.fenced else request.effective_at)
            self.held(request, blocks, at)

    def reclaimed(self, request: Request, at: float) -> None:
        """Everything that it held may be used by anything."""
        self._series("reclaimed", request, at)

    def held(self, request: Request, blocks: int, until: float) -> None:
        """``blocks`` were its until then, though its client had gone."""
        self._cell.tally.block_seconds += blocks * (until - request.acted_at)

    def _series(self, name: str, request: Request, at: float) -> None:
        self._cell.tally.series[name].append(at - request.acted_at)


class ClosedLoop:
    """The clients that are bound to one cell: each asks again when it is done."""

    def __init__(self, cell: Cell, drawer: Drawer, index: int) -> None:
        self._cell = cell
        self._drawer = drawer
        self._cells = cell.config.cells
        self._index = index

    def begin(self) -> None:
        """Every client sends its first request at the start."""
        work = self._drawer.workload
        clients = range(self._index, min(work.clients, work.requests), self._cells)
        for client in clients:
            # Client c asks requests c, c + clients, c + 2 clients ...
            self._cell.to_come += -(-(work.requests - client) // work.clients)
            self._ask(self._drawer.draw(client, 0.0, client=client), START_S)

    def next(self, spec: Spec, free_at: float) -> None:
        """The client of ``spec`` is free: it asks its next, when it has one (closed loops)."""
        work = self._drawer.workload
        number = spec.number + work.clients
        if spec.client < 0 or number >= work.requests:
            return
        at = free_at + work.think_s
        earlier = spec if self._drawer.follows(number) is not None else None
        draw = self._drawer.draw(number, at - START_S, earlier, spec.client)
        self._ask(draw, at)

    def _ask(self, spec: Spec, at: float) -> None:
        self._cell.events.at(at, self._cell.arrive, spec)
