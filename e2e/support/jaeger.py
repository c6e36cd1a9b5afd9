"""The query API of a real Jaeger, as a test reads it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from support.progress import wait_for


@dataclass(frozen=True)
class Span:
    """One span. Times are microseconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    service: str
    start_us: int
    duration_us: int
    tags: dict[str, Any]
    resource: dict[str, Any]  # of its process: node, pod
    links: tuple[tuple[str, str], ...]  # (trace, span) of what it refers to but is no child of

    @property
    def end_us(self) -> int:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Trace:
    trace_id: str
    spans: tuple[Span, ...]

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def values(self, name: str, tag: str) -> set[Any]:
        """The values that the spans of one name have for a tag, their own or their process's."""
        return {
            span.tags.get(tag, span.resource.get(tag))
            for span in self.named(name)
            if tag in span.tags or tag in span.resource
        }

    def children(self, span: Span) -> list[Span]:
        return [each for each in self.spans if each.parent_id == span.span_id]

    def outline(self) -> str:
        """The tree, one span a line: what a failed test shows."""
        known = {span.span_id for span in self.spans}
        lines: list[str] = []

        def add(span: Span, depth: int) -> None:
            lines.append(f"{'  ' * depth}{span.name} [{span.service}] {span.duration_us} us")
            for child in sorted(self.children(span), key=lambda s: s.start_us):
                add(child, depth + 1)

        for span in sorted(self.spans, key=lambda s: s.start_us):
            if span.parent_id not in known:
                add(span, 0)
        return "\n".join(lines)


class Jaeger:
    """`query` is a client of Jaeger's port 16686; pods send to `otlp_endpoint`."""

    def __init__(self, query: httpx.Client, otlp_endpoint: str) -> None:
        self._query = query
        self.otlp_endpoint = otlp_endpoint

    def services(self) -> set[str]:
        return set(self._ask("/api/services") or [])

    def trace(self, trace_id: str) -> Trace | None:
        reply = self._query.get(f"/api/traces/{trace_id}")
        if reply.status_code == httpx.codes.NOT_FOUND:
            return None
        reply.raise_for_status()
        found = reply.json()["data"]
        return _trace(found[0]) if found else None

    def find(
        self, service: str, operation: str | None = None, tags: str | None = None, limit: int = 20
    ) -> list[Trace]:
        """The newest traces of a service; `tags` is a JSON object of span tags."""
        asked = {"service": service, "operation": operation, "tags": tags, "limit": str(limit)}
        found = self._ask("/api/traces", {k: v for k, v in asked.items() if v is not None})
        return [_trace(each) for each in found or []]

    def wait_for_spans(self, trace_id: str, names: Collection[str], seconds: float = 30) -> Trace:
        """The trace, once it has a span of each of these names."""

        def complete() -> Trace | None:
            trace = self.trace(trace_id)
            lacking = set(names) - {span.name for span in trace or ()}
            if lacking:
                raise LookupError(f"no {sorted(lacking)} yet")
            return trace

        found = wait_for(f"trace {trace_id} is complete", complete, seconds)
        assert found is not None
        return found

    def _ask(self, path: str, params: dict[str, str] | None = None) -> Any:
        reply = self._query.get(path, params=params)
        reply.raise_for_status()
        return reply.json()["data"]


def _trace(found: dict[str, Any]) -> Trace:
    spans = tuple(_span(each, found["processes"]) for each in found["spans"])
    return Trace(found["traceID"], spans)


def _span(found: dict[str, Any], processes: dict[str, Any]) -> Span:
    process = processes[found["processID"]]
    own = found["traceID"]
    references = found.get("references", [])
    parents = [
        r["spanID"] for r in references if r["refType"] == "CHILD_OF" and r["traceID"] == own
    ]
    parent = parents[0] if parents else None
    links = tuple((r["traceID"], r["spanID"]) for r in references if r["spanID"] != parent)
    return Span(
        name=found["operationName"],
        trace_id=own,
        span_id=found["spanID"],
        parent_id=parent,
        service=process["serviceName"],
        start_us=found["startTime"],
        duration_us=found["duration"],
        tags=_values(found.get("tags", [])),
        resource=_values(process.get("tags", [])),
        links=links,
    )


def _values(tags: list[dict[str, Any]]) -> dict[str, Any]:
    return {tag["key"]: tag["value"] for tag in tags}
