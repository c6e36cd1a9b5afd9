"""The gateway's spans: one root per request, and the stop with its notify phase.

All are made when they end, as records; nothing is ever "current".
"""

from __future__ import annotations

from stopway_core import names
from stopway_gateway.request import Request, Trace
from stopway_telemetry import SpanRecord, new_span_id, new_trace_id

_OPERATIONS = {"chat": "chat", "completions": "text_completion"}


def begin(traceparent: str, trusted: bool) -> Trace:
    """The place of a new request: below the client's span if trusted, else linked to it."""
    client = names.parse_traceparent(traceparent)
    if client is None:
        return Trace(new_trace_id(), new_span_id())
    trace_id, span_id, _ = client
    if trusted:
        return Trace(trace_id, new_span_id(), parent_id=span_id)
    return Trace(new_trace_id(), new_span_id(), links=((trace_id, span_id),))


def root_span(request: Request) -> SpanRecord:
    """The span of a request whose outcome is settled.

    A stopped request is no error: its status stays unset and ``stopway.outcome`` says it.
    """
    generation = request.generation
    operation = _OPERATIONS[generation.kind]
    ends = [choice.end for choice in request.choices if choice.end is not None]
    attributes: dict[str, object] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "stopway",
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.response.id": request.uid,
        "gen_ai.conversation.id": generation.conversation or None,
        "gen_ai.request.choice.count": generation.n if generation.n > 1 else None,
        "gen_ai.request.max_tokens": generation.params["max_tokens"],
        "gen_ai.request.temperature": generation.params["temperature"],
        "gen_ai.request.top_p": generation.params["top_p"],
        "gen_ai.request.seed": generation.params["seed"],
        "gen_ai.request.stop_sequences": generation.stop or None,
        "gen_ai.response.finish_reasons": [end.finish_reason for end in ends],
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(end.completion_tokens for end in ends),
        "stopway.outcome": str(request.outcome),
        "stopway.reason": str(request.reason),
        "stopway.tenant": request.tenant,
        "stopway.group": request.group or None,
        "stopway.epoch": request.epoch,
        "stopway.tokens.discarded": sum(end.discarded_tokens for end in ends),
    }
    return SpanRecord(
        name=f"{operation} {generation.model}",
        trace_id=request.trace.trace_id,
        span_id=request.trace.span_id,
        parent_id=request.trace.parent_id,
        start=request.created,
        end=request.ended_at,
        attributes={k: v for k, v in attributes.items() if v is not None},  # type: ignore[misc]
        links=request.trace.links,
        kind="server",
        status="error" if request.outcome == "failed" else "unset",
    )
