"""Structured outputs: what travels to the group, what is refused, and how such requests end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from .conftest import ACME, BODIES, Make, Stack, completion, events_of
from .leader import Leader, Plan

SCHEMA = {
    "type": "object",
    "properties": {"why": {"type": "string"}, "answer": {"maximum": 9, "type": "integer"}},
    "required": ["why", "answer"],
}
SCHEMA_TEXT = (
    '{"type":"object","properties":{"why":{"type":"string"},'
    '"answer":{"maximum":9,"type":"integer"}},"required":["why","answer"]}'
)


def json_schema(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    """A ``response_format`` with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, ""),
        ({"response_format": None, "structured_outputs": None}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_object"}}, '{"json_object":true}'),
        ({"response_format": json_schema(strict=True)}, f'{{"json_schema":{SCHEMA_TEXT}}}'),
        ({"structured_outputs": {"json": SCHEMA}}, f'{{"json_schema":{SCHEMA_TEXT}}}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, f'{{"json_schema":{SCHEMA_TEXT}}}'),
        ({"structured_outputs": {"json_object": True}}, '{"json_object":true}'),
        ({"structured_outputs": {"regex": "[a-z]+\\d"}}, '{"regex":"[a-z]+\\\\d"}'),
        ({"structured_outputs": {"choice": ["yes", "é"]}}, '{"choice":["yes","é"]}'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, '{"lark":"start: \\"a\\""}'),
    ],
)
async def test_one_text_for_each_meaning(
    stack: Stack, leader: Leader, route: str, fields: dict[str, Any], grammar: str
) -> None:
    reply = await stack.client.post(route, json=BODIES[route](**fields))
    assert reply.status_code == 200, reply.text
    assert leader.jobs[reply.json()["id"]].message["grammar"] == grammar


def nested(depth: int) -> str:
    return '{"not":' * depth + "true" + "}" * depth


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {**json_schema(), "type": "json_object"}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": json_schema(True)}, "response_format.json_schema.schema"),
        (
            {"response_format": json_schema({"description": "x" * 70_000})},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": "nonsense"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": nested(65)}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": nested(100_000)}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": nested(5_000)}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "é" * 33_000}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_it(
    stack: Stack, leader: Leader, route: str, fields: dict[str, Any], param: str
) -> None:
    reply = await stack.client.post(route, json=BODIES[route](**fields))
    assert reply.status_code == 400 and len(reply.content) < 2000, reply.text[:300]
    assert reply.json()["error"]["param"] == param
    assert not leader.seen


async def test_the_bound_is_a_setting(make: Make, leader: Leader) -> None:
    stack = await make([leader], grammar_bytes_max=len('{"regex":"aaaa"}'))
    for regex, status in (("aaaa", 200), ("aaaaa", 400)):
        body = completion(structured_outputs={"regex": regex})
        assert (await stack.client.post("/v1/completions", json=body)).status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_ends_the_answer_is_a_stop(
    stack: Stack, leader: Leader, stream: bool
) -> None:
    leader.plan = Plan(reason="grammar_end")
    body = completion(structured_outputs={"choice": ["Hello world"]}, stream=stream)
    reply = await stack.client.post("/v1/completions", json=body)
    last = events_of(reply.text)[-2] if stream else reply.json()
    assert (reply.status_code, last["choices"][0]["finish_reason"]) == (200, "stop")
    shown = await stack.client.get(f"/v1/requests/{reply.headers['x-request-id']}")
    assert (shown.json()["outcome"], shown.json()["reason"]) == ("finished", "grammar_end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_grammar_that_cannot_be_compiled_is_a_400_with_the_leaders_words(
    stack: Stack, leader: Leader, stream: bool, n: int
) -> None:
    """It is found out after the request was queued; a stream's headers have waited for that."""
    leader.plan = Plan(tokens=False)
    body = completion(structured_outputs={"grammar": "start: x"}, stream=stream, n=n)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=body))
    await stack.until(lambda: any(r.accepted for r in stack.gateway.table.live()))
    (uid,) = leader.running
    leader.plan = Plan(message="the grammar has no rule x")
    await leader._end(leader.jobs[uid], "bad_input", "failed")
    reply = await task
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "bad_input")
    assert error["message"] == "the grammar has no rule x"


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
async def test_a_grammar_that_the_front_refuses_names_the_clients_field(
    stack: Stack, leader: Leader, field: str
) -> None:
    leader.plan = Plan(
        refuse={
            "status": 400,
            "message": "no such type",
            "code": "invalid_grammar",
            "param": "response_format",
        }
    )
    value = json_schema() if field == "response_format" else {"json": SCHEMA}
    for stream in (False, True):
        body = completion(**{field: value}, stream=stream)
        reply = await stack.client.post("/v1/completions", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_grammar", field)


async def test_priority_is_bounded_and_below_zero_for_admins(stack: Stack, leader: Leader) -> None:
    for priority, headers, status in (
        (None, ACME, 200),
        (0, ACME, 200),
        (100, ACME, 200),
        (101, None, 400),
        (-101, None, 400),
        (True, None, 400),
        (1.0, None, 400),
        (-1, ACME, 400),
        (-100, None, 200),
    ):
        body = completion(priority=priority)
        reply = await stack.client.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == status, (priority, reply.text)
        if status == 200:
            uid = reply.json()["id"]
            assert leader.jobs[uid].message["priority"] == (priority or 0)
            shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
            assert shown["priority"] == (priority or 0)
        else:
            error = reply.json()["error"]
            assert error["param"] == "priority"
            assert ("is for admins" in error["message"]) == (headers is ACME)
    assert len(leader.seen) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_is_stopped_while_its_grammar_is_checked_was_stopped(
    stack: Stack, leader: Leader, stream: bool
) -> None:
    """The front refuses it then: no leader ever has it, and the stop has nothing to wait for."""
    leader.plan = Plan(prepares=True)
    body = completion(structured_outputs={"regex": "a"}, stream=stream)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=body))
    await leader.wait_for(lambda: leader.seen)
    (uid,) = leader.seen
    cancel = asyncio.create_task(
        stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed&timeout=10")
    )
    await leader.wait_for(lambda: leader.stops)
    refusal = {"message": "stopped", "code": "client_cancel", "param": None}
    await leader.send({"type": "refused", "uid": uid, "status": 409, **refusal})
    told = (await cancel).json()
    assert (told["status"], told["outcome"], told["pending_on"]) == ("reclaimed", "stopped", [])
    reply = await task
    last = events_of(reply.text)[-2] if stream else reply.json()
    assert (reply.status_code, last["choices"][0]["stop_reason"]) == (200, "client_cancel")
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert (shown["outcome"], shown["reason"]) == ("stopped", "client_cancel")
