"""Spans as finished records: made when a phase ends, never current, never in the way.

A record needs no context, so a span can't be left open by a cancelled task or closed in another
task's context. ``Exporter`` takes records without blocking and sends them on from a thread of its
own; telemetry that fails or hangs touches no request.
"""

from stopway_telemetry.exporter import Exporter
from stopway_telemetry.records import (
    SpanRecord,
    make_traceparent,
    new_span_id,
    new_trace_id,
)
from stopway_telemetry.store import SpanStore, load_spans

__all__ = [
    "Exporter",
    "SpanRecord",
    "SpanStore",
    "load_spans",
    "make_traceparent",
    "new_span_id",
    "new_trace_id",
]
