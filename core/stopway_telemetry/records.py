"""The record of one finished span, and the ids that tie records together."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("internal", "server", "client", "producer", "consumer")
STATUSES = ("unset", "ok", "error")

AttributeValue = str | bool | int | float | list[str] | list[int] | list[float]


def new_trace_id() -> str:
    """A random W3C trace id: 32 hex digits, never all zero."""
    return _random_hex(16)


def new_span_id() -> str:
    """A random W3C span id: 16 hex digits, never all zero."""
    return _random_hex(8)


def make_traceparent(trace_id: str, span_id: str) -> str:
    """The W3C ``traceparent`` of a sampled span."""
    return f"00-{trace_id}-{span_id}-01"


def _random_hex(size: int) -> str:
    while True:
        text = secrets.token_hex(size)
        if text.strip("0"):
            return text


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span. ``start`` and ``end`` are Unix seconds; ids are lower-case hex.

    ``links`` are (trace id, span id) pairs; ``parent_id`` is empty for a root.
    """

    name: str
    trace_id: str
    span_id: str
    start: float
    end: float
    parent_id: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    kind: str = "internal"
    status: str = "unset"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values; ``from_json`` gives it back."""
        return {
            "name": self.name,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_id": self.parent_id,
            "start": self.start,
            "end": self.end,
            "attributes": dict(self.attributes),
            "links": [list(link) for link in self.links],
            "kind": self.kind,
            "status": self.status,
        }

    @classmethod
    def from_json(cls, value: Any) -> SpanRecord:
        """The record that ``value`` describes. Raises ``ValueError`` when it describes none."""
        try:
            record = cls(
                name=str(value["name"]),
                trace_id=_hex(value["trace_id"], 32),
                span_id=_hex(value["span_id"], 16),
                parent_id=_hex(value["parent_id"], 16) if value.get("parent_id") else "",
                start=float(value["start"]),
                end=float(value["end"]),
                attributes=dict(value.get("attributes") or {}),
                links=tuple((_hex(t, 32), _hex(s, 16)) for t, s in value.get("links") or ()),
                kind=str(value.get("kind", "internal")),
                status=str(value.get("status", "unset")),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a span record: {error}") from None
        if record.kind not in KINDS or record.status not in STATUSES:
            raise ValueError(f"a span of kind {record.kind!r}, status {record.status!r}")
        return record


def _hex(value: Any, digits: int) -> str:
    text = str(value)
    if len(text) != digits or set(text) - set("0123456789abcdef"):
        raise ValueError(f"not an id of {digits} hex digits: {text[:40]!r}")
    return text
