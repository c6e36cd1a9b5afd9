"""What one rank knows of the stops that it has heard of: for Progress, reports and spans."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from stopway_core import names
from stopway_core.ledger import Dropped
from stopway_core.replica import StopApplied
from stopway_engine.trace import Span, span

REPORT_AFTER_S = 0.05
KEEP_MAX = 20_000


@dataclass(slots=True)
class _Known:
    noticed_at: float = 0.0
    turn_noticed: int = 0
    applied_at: float = 0.0
    turn: int = 0
    drain_step: int = 0
    traceparent: str = ""
    dropped: Dropped | None = None


class RankStops:
    """Notices that came ahead of their turn, and stops in turns until their steps are drained."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._draining: dict[str, _Known] = {}
        self._unreported: OrderedDict[str, tuple[float, Any]] = OrderedDict()  # (due, entry)

    def notice(
        self, entry: dict[str, Any], read_at: float, now: float, mono: float, turn: int
    ) -> Span | None:
        """A notice came; the first one of each stop counts. Returns its span."""
        stop_id = entry["stop_id"]
        if stop_id in self._known:
            return None
        known = self._remember(stop_id)
        known.noticed_at, known.turn_noticed = now, turn
        known.traceparent = entry.get("traceparent", "")
        self._unreported[stop_id] = (mono + REPORT_AFTER_S, entry)
        return self._span(names.SPAN_NOTICE, stop_id, known, read_at, now)

    def applied(self, stop: StopApplied, turn: int, now: float) -> list[Span]:
        """A turn brought a stop. Without a notice before, that is when it was noticed."""
        self._unreported.pop(stop.stop_id, None)
        known = self._known.get(stop.stop_id)
        spans = []
        if known is None:
            known = self._remember(stop.stop_id)
            known.noticed_at, known.turn_noticed = now, turn
            known.traceparent = stop.traceparent
            spans.append(self._span(names.SPAN_NOTICE, stop.stop_id, known, now, now))
        self._known.move_to_end(stop.stop_id)  # its first notice is asked for in this very turn
        known.traceparent = stop.traceparent or known.traceparent
        known.applied_at, known.turn = now, turn
        known.drain_step, known.dropped = stop.drain_step, stop.dropped
        self._draining[stop.stop_id] = known
        return [record for record in spans if record is not None]

    def executed(self, step: int, now: float) -> list[Span]:
        """Every step up to ``step`` has run here. Returns the spans of stops that are done."""
        spans: list[Span | None] = []
        for stop_id, known in list(self._draining.items()):
            if step < known.drain_step:
                continue
            del self._draining[stop_id]
            end = now if known.drain_step else known.applied_at
            spans.append(self._span(names.SPAN_IN_FLIGHT, stop_id, known, known.noticed_at, end))
            spans.append(self._span(names.SPAN_RECLAIM, stop_id, known, known.applied_at, end))
            spans.append(self._span(names.SPAN_HANDOFF, stop_id, known, end, end))
        return [record for record in spans if record is not None]

    def overdue(self, mono: float) -> list[Any]:
        """Notices that no turn has confirmed in time: the leader must be told of them."""
        due = []
        while self._unreported:
            stop_id, (when, entry) = next(iter(self._unreported.items()))
            if when > mono:
                break
            del self._unreported[stop_id]
            due.append(entry)
        return due

    def next_timer(self) -> float | None:
        """When (monotonic) ``overdue`` has something."""
        for when, _ in self._unreported.values():
            return when
        return None

    def first_notice(self, stop_id: str) -> tuple[int, float]:
        """(turn, time) at which this rank first heard of a stop that it knows."""
        known = self._known[stop_id]
        return known.turn_noticed, known.noticed_at

    def _remember(self, stop_id: str) -> _Known:
        known = self._known[stop_id] = _Known()
        if len(self._known) > KEEP_MAX:
            self._known.popitem(last=False)
        return known

    def _span(
        self, name: str, stop_id: str, known: _Known, start: float, end: float
    ) -> Span | None:
        attributes = {
            **self._attributes,
            "stopway.stop.id": stop_id,
            "stopway.turn.noticed": known.turn_noticed,
        }
        if known.dropped is not None:
            attributes["stopway.turn.effective"] = known.turn
            attributes["stopway.step.drained"] = known.drain_step
            attributes["stopway.blocks.reclaimed"] = known.dropped.freed
            attributes["stopway.blocks.cached"] = known.dropped.cached
            attributes["stopway.blocks.lent"] = known.dropped.lent
        return span(name, known.traceparent, start, end, attributes)
