"""Spans as plain records: made when a phase ends, sent to ``supervise``, exported there.

A rank never talks to a collector, so a collector that hangs touches no step, and what a rank has
recorded survives its crash.
"""

from __future__ import annotations

import secrets
from typing import Any

from stopway_core import names
from stopway_core.events import Ended

Span = dict[str, Any]


def span(
    name: str, traceparent: str, start: float, end: float, attributes: dict[str, Any]
) -> Span | None:
    """A record under the context in ``traceparent``; ``None`` when that is not one."""
    context = names.parse_traceparent(traceparent)
    if context is None:
        return None
    trace_id, parent_id, _ = context
    return {
        "name": name,
        "trace_id": trace_id,
        "span_id": secrets.token_hex(8),
        "parent_id": parent_id,
        "start": start,
        "end": max(start, end),
        "attributes": attributes,
    }


def request_spans(ended: Ended, attributes: dict[str, Any]) -> list[Span]:
    """The phases of a request that the leader saw; those that it did not reach are not made."""
    base = {
        **attributes,
        "stopway.request.id": ended.uid,
        "stopway.outcome": ended.outcome.value,
        "stopway.reason": ended.reason.value,
    }
    ready = ended.ready_at or ended.ended_at
    phases: list[tuple[str, float, float, dict[str, Any]]] = []
    if ready != ended.queued_at:
        phases.append(("request.compile", ended.queued_at, ready, {}))
    if ended.ready_at:
        queue_end = ended.admitted_at or ended.ended_at
        phases.append(("request.queue", ready, queue_end, {}))
    if ended.admitted_at:
        prefill_end = ended.first_token_at or ended.ended_at
        tokens = {
            "gen_ai.usage.input_tokens": ended.prompt_tokens,
            "stopway.tokens.cached": ended.cached_tokens,
        }
        phases.append(("request.prefill", ended.admitted_at, prefill_end, tokens))
    if ended.first_token_at:
        tokens = {
            "gen_ai.usage.output_tokens": ended.keep,
            "stopway.tokens.discarded": ended.discarded_tokens,
            "stopway.preemptions": ended.preemptions,
            "stopway.tokens.drafted": ended.drafted_tokens,
            "stopway.tokens.accepted": ended.accepted_tokens,
        }
        phases.append(("request.decode", ended.first_token_at, ended.ended_at, tokens))
    made = [
        span(name, ended.traceparent, start, end, {**base, **extra})
        for name, start, end, extra in phases
    ]
    return [record for record in made if record is not None]
