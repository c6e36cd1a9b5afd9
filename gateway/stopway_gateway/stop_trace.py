"""A stop's spans and phase times, made from its receipts."""

from __future__ import annotations

import time
from typing import Any

from stopway_core import names
from stopway_core.types import StopStatus
from stopway_gateway.metrics import Metrics
from stopway_gateway.stops import Part, StopRecord
from stopway_telemetry import Exporter, SpanRecord


def emit(record: StopRecord, exporter: Exporter, *, final: bool = False) -> None:
    """Emit the span of each phase that has ended, once; ``final``: of what has not, too."""
    if "notify" not in record.traced and (final or record.reached(StopStatus.NOTICED)):
        record.traced.add("notify")
        exporter.emit(_notify_span(record))
    if "stop" not in record.traced and (final or record.resolved):
        record.traced.add("stop")
        exporter.emit(_stop_span(record))


def observe(record: StopRecord, part: Part, metrics: Metrics) -> None:
    """Count how long the phases of one group's part took (clocks of its ranks and ours)."""
    ranks = part.receipt.get("ranks") or []
    times = [record.stop.issued_at]
    times += [_latest(ranks, key) or 0.0 for key in ("noticed_at", "stopped_at", "reclaimed_at")]
    for phase, begin, end in zip(names.PHASES, times, times[1:], strict=False):
        if begin and end:
            metrics.stop_phase.labels(phase).observe(max(0.0, end - begin))


def _latest(ranks: list[dict[str, Any]], key: str) -> float | None:
    known = [rank[key] for rank in ranks if rank.get(key) is not None]
    return max(known) if known else None


def _ranks(record: StopRecord) -> list[dict[str, Any]]:
    return [rank for part in record.parts.values() for rank in part.receipt.get("ranks") or []]


def _attributes(record: StopRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "stopway.stop.id": record.stop.stop_id,
        "stopway.stop.reason": str(record.stop.reason),
        "stopway.stop.status": str(record.status),
    }
    groups = [part.group for part in record.shown()]
    if groups:
        attributes["stopway.group"] = groups[0] if len(groups) == 1 else groups
    return attributes


def _notify_span(record: StopRecord) -> SpanRecord:
    start = record.stop.issued_at
    return SpanRecord(
        name=names.SPAN_NOTIFY,
        trace_id=record.span.trace_id,
        span_id=record.notify_id,
        parent_id=record.span.span_id,
        start=start,
        # The ranks' clocks may differ from ours; a span never ends before it began.
        end=max(start, _latest(_ranks(record), "noticed_at") or time.time()),
        attributes=_attributes(record),
        kind="producer",
    )


def _stop_span(record: StopRecord) -> SpanRecord:
    parts = [part.receipt for part in record.parts.values()]
    attributes = _attributes(record)
    for attribute, key in (
        ("stopway.tokens.discarded", "tokens_discarded"),
        ("stopway.blocks.reclaimed", "blocks_reclaimed"),
        ("stopway.blocks.cached", "blocks_cached"),
        ("stopway.blocks.lent", "blocks_lent"),
    ):
        attributes[attribute] = sum(int(receipt.get(key) or 0) for receipt in parts)
    turns = [r["turn_effective"] for r in parts if r.get("turn_effective") is not None]
    if turns:
        attributes["stopway.turn.effective"] = turns[0] if len(turns) == 1 else turns
    start = record.stop.issued_at
    return SpanRecord(
        name=names.SPAN_STOP,
        trace_id=record.span.trace_id,
        span_id=record.span.span_id,
        parent_id=record.span.parent_id,
        start=start,
        end=max(start, _latest(_ranks(record), "reclaimed_at") or time.time()),
        attributes=attributes,
        links=record.span.links,
    )
