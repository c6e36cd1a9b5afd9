"""Span records as OpenTelemetry spans, batched and posted by the OpenTelemetry SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from stopway_telemetry.records import SpanRecord

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("stopway")


def traces_url(endpoint: str) -> str:
    """The URL to post spans to: ``endpoint`` itself, or its ``/v1/traces`` when it is a base."""
    base = endpoint.rstrip("/")
    return base if urlsplit(base).path.endswith("/v1/traces") else f"{base}/v1/traces"


class OtlpPipe:
    """Converts records and gives them to a ``BatchSpanProcessor``."""

    def __init__(
        self, service_name: str, resource: Mapping[str, str], endpoint: str, timeout_s: float
    ) -> None:
        self._resource = Resource({"service.name": service_name, **resource})
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=timeout_s),
            schedule_delay_millis=500,
        )

    def append(self, records: Iterable[SpanRecord]) -> None:
        """Queue ``records`` for the next batch."""
        for record in records:
            self._processor.on_end(to_readable_span(record, self._resource))

    def shutdown(self, timeout_s: float) -> None:
        """Flush for at most ``timeout_s``.

        The SDK waits for an export that is under way, so it gets a thread to wait on: with a
        collector that never answers, this returns in time and the daemon thread dies with us.
        """
        thread = threading.Thread(target=self._processor.shutdown, name="spans-end", daemon=True)
        thread.start()
        thread.join(timeout_s)


def to_readable_span(record: SpanRecord, resource: Resource) -> ReadableSpan:
    """``record`` as the SDK's finished span (nanoseconds, integer ids)."""
    return ReadableSpan(
        name=record.name,
        context=_context(record.trace_id, record.span_id),
        parent=_context(record.trace_id, record.parent_id) if record.parent_id else None,
        resource=resource,
        attributes={k: v for k, v in record.attributes.items() if v is not None},
        links=[Link(_context(trace, span)) for trace, span in record.links],
        kind=SpanKind[record.kind.upper()],
        status=Status(StatusCode[record.status.upper()]),
        start_time=round(record.start * 1e9),
        end_time=round(max(record.start, record.end) * 1e9),
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)
