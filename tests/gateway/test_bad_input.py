"""What must be refused, small and early, and what must not be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from .conftest import ACME, BODIES, SOON_S, Make, Stack, chat, completion
from .leader import Leader, Plan

ROUTES = [pytest.param(route, id=route.rsplit("/", 1)[-1]) for route in BODIES]
JSON = {"content-type": "application/json"}


def small_error(reply: Any, *statuses: int) -> dict[str, Any]:
    """The error object of a small 4xx."""
    assert reply.status_code in (statuses or (400,)), reply.text[:300]
    assert len(reply.content) < 2000
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


async def raw_reply(stack: Stack, message: bytes) -> tuple[int, bytes]:
    """The status and body that these bytes are answered with, up to the connection's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(message)
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize("route", ROUTES)
async def test_case_g09_bodies_that_are_refused(stack: Stack, leader: Leader, route: str) -> None:
    texts = [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"a":' * 100_000,
    ]
    base = json.dumps(BODIES[route]())[:-1]
    for value in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 5000, '"\\ud800"'):
        texts.append(f'{base}, "temperature": {value}}}'.encode())
        texts.append(f'{base}, "user": {value}}}'.encode())
    for text in texts:
        small_error(await stack.client.post(route, content=text, headers=JSON))
    assert not leader.seen
    leader.plan = Plan()
    assert (await stack.client.post(route, json=BODIES[route]())).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
async def test_case_g09_fields_that_are_refused(stack: Stack, leader: Leader, route: str) -> None:
    bad: list[dict[str, Any]] = [
        {"n": 0},
        {"n": -1},
        {"n": 17},
        {"n": 10**9},
        {"n": 10**30},
        {"n": True},
        {"n": "1"},
        {"n": 1.5},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": 10**12},
        {"max_tokens": 2, "min_tokens": 3},
        {"seed": 2**64},
        {"stop": ""},
        {"stop": ["ok", ""]},
        {"stop": ["x"] * 17},
        {"stop": "x" * 257},
        {"stop": [1]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [2**31]},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"deadlines": {"queue": -1}},
        {"deadlines": {"total": 0}},
        {"deadlines": 5},
        {"metadata": {"conversation_id": ""}},
        {"metadata": {"conversation_id": "x" * 129}},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {str(key): "v" for key in range(17)}},
        {"metadata": {"k": 1}},
        {"logit_bias": {"1": 5}},
        {"best_of": 2},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_schema"}},
        {"suffix": "x"},
        {"audio": {}},
        {"model": ""},
        {"model": 5},
        {"model": None},
    ]
    if route.endswith("chat/completions"):
        bad += [
            {"messages": []},
            {"messages": "hi"},
            {"messages": [{"role": "king", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": [{"role": "tool", "content": "x"}]},
            {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 21},
        ]
    else:
        bad += [
            {"prompt": ""},
            {"prompt": []},
            {"prompt": ["a", "b"]},
            {"prompt": [[1], [2]]},
            {"prompt": [-1]},
            {"prompt": None},
            {"prompt": [1, "a"]},
            {"logprobs": 21},
            {"echo": True},
        ]
    for fields in bad:
        error = small_error(await stack.client.post(route, json={**BODIES[route](), **fields}))
        assert error["type"] == "invalid_request_error", fields
    assert not leader.seen


async def test_harmless_fields_are_accepted(stack: Stack, leader: Leader) -> None:
    harmless = {
        "user": "u",
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "made_up": {"x": 1},
        "stop": None,
        "n": None,
        "seed": None,
        "top_k": -1,
    }
    for route, make_body in BODIES.items():
        reply = await stack.client.post(route, json=make_body(**harmless))
        assert reply.status_code == 200, reply.text
    body = chat(
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}],
        seed=-1,
        stop="END",
        max_completion_tokens=7,
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
        deadlines={"queue": 5, "total": 9.5},
        metadata={"conversation_id": "c", "other": "x"},
        stop_token_ids=[1, 1, 2],
    )
    reply = await stack.client.post("/v1/chat/completions", json=body)
    sent = leader.jobs[reply.json()["id"]].message
    assert sent["prompt"] == {"messages": [{"role": "system", "content": "a"}]}
    assert sent["stop"] == ["END"] and sent["conversation"] == "c"
    params = sent["params"]
    assert (params["max_tokens"], params["logprobs"]) == (7, 2)
    assert params["stop_token_ids"] == [1, 2] and params["seed"] == 2**63 - 1
    assert 0 < sent["deadlines"]["queue"] <= 5 and sent["deadlines"]["first_token"] is None


@pytest.mark.parametrize("route", ROUTES)
async def test_case_g09_bodies_too_large_and_lengths_that_lie(
    make: Make, leader: Leader, route: str
) -> None:
    stack, hasty = await make([leader]), await make([leader], body_timeout_s=0.3)
    huge = b"x" * (100 * 1024 * 1024)
    reply = await stack.client.post(route, content=huge, headers=JSON)
    assert small_error(reply, 413)["code"] == "body_too_large"

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100_000

    small_error(await stack.client.post(route, content=chunks(), headers=JSON), 413)

    start = f"POST {route} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin-key\r\n"
    body = json.dumps(BODIES[route]())
    for length, asked, expected in (
        (len(body) + 50, hasty, 408),
        (5, stack, 400),
        (10**15, stack, 413),
    ):
        message = f"{start}connection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        status, answer = await raw_reply(asked, message.encode())
        assert status == expected and b'{"error":{"message":' in answer and len(answer) < 1000
    for length in ("-1", "abc", "1e3", "9" * 400):
        message = f"{start}content-length: {length}\r\n\r\n{body}"
        status, answer = await raw_reply(stack, message.encode())
        assert 400 <= status < 500 and b'"error"' in answer and len(answer) < 1000
    assert not leader.seen
    assert (await stack.client.post(route, json=BODIES[route]())).status_code == 200


async def test_case_g08_client_ids(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(tokens=False)
    same = {"x-request-id": "mine"}
    tasks = [
        asyncio.create_task(stack.client.post("/v1/completions", json=completion(), headers=same))
        for _ in range(2)
    ]
    await leader.wait_for(lambda: len(leader.running) == 2)
    listed = (await stack.client.get("/v1/requests")).json()["data"]
    assert [item["client_request_id"] for item in listed] == ["mine", "mine"]
    assert len({item["id"] for item in listed}) == 2
    # It never addresses.
    assert (await stack.client.post("/v1/requests/mine/cancel")).status_code == 404
    for uid in list(leader.running):
        await stack.client.post(f"/v1/requests/{uid}/cancel")
    assert [(await task).status_code for task in tasks] == [200, 200]

    for bad in ("", "a b", "x" * 129, "x" * 10_000):
        reply = await stack.client.post(
            "/v1/completions", json=completion(), headers={"x-request-id": bad}
        )
        assert small_error(reply)["param"] == "x-request-id"
    message = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: " + b"x" * (1 << 20)
    status, answer = await raw_reply(stack, message + b"\r\n\r\n")
    assert status == 431 and b'"error"' in answer
    assert (await stack.client.get("/healthz")).status_code == 200


async def test_keys_routes_and_admins(stack: Stack) -> None:
    for headers in ({"authorization": "Bearer nope"}, {"authorization": "Basic x"}, {}):
        request = stack.client.build_request("GET", "/v1/models")
        request.headers.pop("authorization")
        request.headers.update(headers)
        reply = await stack.client.send(request)
        assert small_error(reply, 401)["code"] == "invalid_api_key"
    small_error(await stack.client.get("/nowhere"), 404)
    small_error(await stack.client.get("/v1/completions"), 405)
    small_error(await stack.client.get("/debug/ledger", headers=ACME), 403)
    small_error(await stack.client.get("/debug/trace?trace_id=x"), 400)
    (group,) = (await stack.client.get("/debug/ledger")).json()["groups"]
    assert group == {"group": "g0", "epoch": 7, "free": 100}
    small_error(await stack.client.get("/v1/requests?limit=0"))
    small_error(await stack.client.get("/v1/stops/stop-1"), 404)


async def test_a_malformed_chunk_gets_an_answer(make: Make, leader: Leader) -> None:
    """The headers were fine, and nothing has been said yet."""
    stack = await make([leader])
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin-key\r\n"
    message = head.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    status, _ = await raw_reply(stack, message)
    assert status == 400
    assert not leader.seen


@pytest.mark.parametrize("everything", [1, 1.0, "true", False])
async def test_only_true_stops_everything(make: Make, leader: Leader, everything: object) -> None:
    stack = await make([leader])
    small_error(await stack.client.post("/v1/stops", json={"all": everything}), 400)


@pytest.mark.parametrize("penalty", [1e-320, 1e-40, 0.001, 0])
async def test_a_penalty_that_would_overflow_is_refused(
    make: Make, leader: Leader, penalty: float
) -> None:
    stack = await make([leader])
    body = completion() | {"repetition_penalty": penalty}
    reply = await stack.client.post("/v1/completions", json=body)
    assert small_error(reply, 400)["param"] == "repetition_penalty"
    assert not leader.seen


async def test_too_many_at_once(make: Make, leader: Leader) -> None:
    stack = await make([leader], requests_max=1)
    leader.plan = Plan(tokens=False)
    first = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 1)
    reply = await stack.client.post("/v1/completions", json=completion())
    assert small_error(reply, 429)["code"] == "too_many_requests"
    await stack.client.post("/v1/stops", json={"all": True})
    assert (await first).status_code == 200
