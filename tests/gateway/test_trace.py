"""Spans: one trace per request, its stop inside it, and what cancelling does not break."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stopway_core import names
from stopway_core.types import Outcome, Reason
from stopway_gateway.generation import parse_completion
from stopway_gateway.request import End, Request, Trace
from stopway_gateway.stop_bus import connect
from stopway_telemetry import SpanRecord, load_spans

from .conftest import Make, Stack, completion, events_of, eventually
from .leader import Leader, Plan


async def spans_of(stack: Stack, trace_id: str, count: int) -> dict[str, SpanRecord]:
    """The spans of a trace by name, once there are ``count``."""
    await stack.until(lambda: len(load_spans(stack.spans_dir, trace_id)) >= count)
    spans = load_spans(stack.spans_dir, trace_id)
    assert len(spans) == count, [span.name for span in spans]
    return {span.name: span for span in spans}


async def stopped(stack: Stack, leader: Leader, headers: Any = None) -> dict[str, Any]:
    """The receipt of an endless request that was cancelled."""
    leader.plan = Plan(chunks=None, pace_s=0.005)
    task = asyncio.create_task(
        stack.client.post("/v1/completions", json=completion(), headers=headers)
    )
    await leader.wait_for(lambda: leader.running)
    (uid,) = leader.running
    receipt = (await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")).json()
    assert (await task).status_code == 200
    return receipt


async def test_finished_request_has_one_span(stack: Stack) -> None:
    body = completion(seed=7, metadata={"conversation_id": "c"})
    uid = (await stack.client.post("/v1/completions", json=body)).json()["id"]
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    (span,) = (await spans_of(stack, shown["trace_id"], 1)).values()
    assert span.name == "text_completion smollm2-135m-instruct" and span.kind == "server"
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.seed": 7,
        "gen_ai.conversation.id": "c",
        "gen_ai.response.id": uid,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.output_tokens": 2,
        "stopway.outcome": "finished",
    }
    assert {key: span.attributes[key] for key in wanted} == wanted
    got = await stack.client.get(f"/debug/trace?trace_id={shown['trace_id']}")
    assert [s["span_id"] for s in got.json()["spans"]] == [span.span_id]


async def test_case_t02_a_cancelled_request_is_no_error(stack: Stack, leader: Leader) -> None:
    receipt = await stopped(stack, leader)
    spans = await spans_of(stack, receipt["trace_id"], 3)
    root = spans["text_completion smollm2-135m-instruct"]
    assert root.status == "unset" and root.attributes["stopway.outcome"] == "stopped"
    stop, notify = spans["stop"], spans["stop.notify"]
    assert stop.parent_id == root.span_id and notify.parent_id == stop.span_id
    assert stop.attributes["stopway.stop.id"] == receipt["stop_id"]
    assert stop.attributes["stopway.blocks.reclaimed"] == 2
    assert stop.attributes["stopway.turn.effective"] == receipt["groups"][0]["turn_effective"]
    # What the ranks are told is the context of stop.notify: their spans go below it.
    signed = leader.stops[receipt["stop_id"]]
    assert names.parse_traceparent(signed["traceparent"]) == (
        receipt["trace_id"],
        notify.span_id,
        True,
    )


async def test_case_t03_outcome_is_settled_before_cleanup_and_the_first_wins() -> None:
    from stopway_gateway.config import Settings

    generation = parse_completion(completion(n=2), Settings())
    request = Request("u", "t", generation, Trace("1" * 32, "2" * 16), "", 1000)
    seen: list[tuple[Any, Any]] = []

    def settle(settled: Request) -> None:
        seen.append((settled.outcome, settled.reason))
        raise RuntimeError("the cleanup fails")

    request.on_settled = settle
    request.cut_by(Reason.CLIENT_CANCEL)
    request.on_end(0, End(Outcome.FINISHED, Reason.EOS, "stop"))
    with pytest.raises(RuntimeError):
        request.on_end(1, End(Outcome.STOPPED, Reason.CLIENT_CANCEL, "abort"))
    request.settle(Reason.RANK_LOST)
    request.on_end(0, End(Outcome.FAILED, Reason.ENGINE_ERROR, "abort"))
    assert (request.outcome, request.reason) == (Outcome.STOPPED, Reason.CLIENT_CANCEL)
    assert seen == [(Outcome.STOPPED, Reason.CLIENT_CANCEL)]


async def test_case_t03_span_ends_while_the_client_still_does_not_read(
    make: Make, leader: Leader
) -> None:
    stack = await make([leader], slow_reader_bytes_max=1 << 30)
    leader.plan = Plan(chunks=["x" * (1 << 20)] * 64, pace_s=0.001)
    body = json.dumps(completion(stream=True)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=1024)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin-key\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    # Its handler is blocked in a send; the leader has finished: so has the span.
    await stack.until(lambda: leader.seen and not len(stack.gateway.table))
    assert stack.gateway.active == 1
    shown = (await stack.client.get(f"/v1/requests/{leader.seen[0]}")).json()
    (span,) = (await spans_of(stack, shown["trace_id"], 1)).values()
    assert span.attributes["stopway.outcome"] == "finished"
    writer.transport.abort()
    await stack.quiet()
    assert len(load_spans(stack.spans_dir, shown["trace_id"])) == 1


async def test_case_t04_streams_closed_from_elsewhere_leave_no_open_span(
    stack: Stack, leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    """200 over HTTP here; the raw 1,000 with a cancel are g07, over the same code."""
    leader.plan = Plan(chunks=None, pace_s=0.001)

    async def once() -> None:
        body = completion(stream=True)
        request = stack.client.build_request("POST", "/v1/completions", json=body)
        reply = await stack.client.send(request, stream=True)
        lines = reply.aiter_lines()
        await anext(lines)
        await reply.aclose()  # from this task, while the handler's task sends

    for _ in range(20):
        await asyncio.gather(*(once() for _ in range(10)))
    await stack.quiet()
    listed = (await stack.client.get("/v1/requests?limit=1000")).json()["data"]
    assert len(listed) == 200
    assert not [r for r in caplog.records if r.levelname == "ERROR" or "detach" in r.message]
    last = listed[0]["trace_id"]
    await stack.until(lambda: load_spans(stack.spans_dir, last))


async def test_case_t06_the_context_travels_in_the_entry(
    make: Make, leader: Leader, redis_url: str
) -> None:
    stack = await make([leader], redis_url=redis_url, service_uid="t06", resend_after_s=0.1)
    receipt = await stopped(stack, leader)
    client = connect(redis_url)
    stream = names.stops_stream("t06", "g0")

    async def written() -> bool:
        return await client.xlen(stream) > 0

    await eventually(written)  # the stop itself went past Redis
    ((_, fields),) = await client.xrange(stream)
    await client.aclose()
    spans = await spans_of(stack, receipt["trace_id"], 3)
    context = names.parse_traceparent(json.loads(fields["stop"])["traceparent"])
    assert context == (receipt["trace_id"], spans["stop.notify"].span_id, True)
    shown = (await stack.client.get(f"/v1/requests/{receipt['request_ids'][0]}")).json()
    assert shown["trace_id"] == receipt["trace_id"]


@pytest.mark.parametrize("trusted", [False, True])
async def test_client_context_is_a_link_unless_trusted(
    make: Make, leader: Leader, trusted: bool
) -> None:
    stack = await make([leader], trust_traceparent=trusted)
    trace_id, span_id = "ab" * 16, "cd" * 8
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    reply = await stack.client.post("/v1/completions", json=completion(), headers=headers)
    shown = (await stack.client.get(f"/v1/requests/{reply.json()['id']}")).json()
    (span,) = (await spans_of(stack, shown["trace_id"], 1)).values()
    if trusted:
        assert (span.trace_id, span.parent_id, span.links) == (trace_id, span_id, ())
    else:
        assert span.trace_id != trace_id and span.parent_id == ""
        assert span.links == ((trace_id, span_id),)


async def test_a_stop_of_many_is_a_trace_of_its_own_linked_to_each(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(chunks=None, pace_s=0.005)
    body = completion(stream=True)
    tasks = [asyncio.create_task(stack.client.post("/v1/completions", json=body)) for _ in range(2)]
    await leader.wait_for(lambda: len(leader.running) == 2)
    reply = await stack.client.post("/v1/stops", json={"all": True, "wait": "reclaimed"})
    traces = {r.trace.trace_id for r in stack.gateway.table._ended.values()}
    spans = await spans_of(stack, reply.json()["trace_id"], 2)
    assert reply.json()["trace_id"] not in traces
    assert {trace_id for trace_id, _ in spans["stop"].links} == traces
    for task in tasks:
        assert events_of((await task).text)[-1] == "[DONE]"
