"""Requests that run to their end, streaming and not."""

from __future__ import annotations

import pytest

from .conftest import BODIES, Stack, chat, completion, events_of
from .leader import Leader, Plan


async def test_chat_whole(stack: Stack, leader: Leader) -> None:
    reply = await stack.client.post("/v1/chat/completions", json=chat(temperature=0))
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"] == reply.headers["x-request-id"]
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Hello world"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert body["usage"]["completion_tokens"] == 2
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["stopway"] == {"discarded_tokens": 0}
    job = leader.jobs[body["id"]]
    assert job.message["params"]["temperature"] == 0.0
    assert job.message["prompt"] == {"messages": [{"role": "user", "content": "hi"}]}
    await stack.quiet()


async def test_stream_of_two_choices_with_usage(stack: Stack) -> None:
    body = chat(n=2, stream=True, stream_options={"include_usage": True})
    reply = await stack.client.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events_of(reply.text)
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert {chunk["id"] for chunk in chunks} == {reply.headers["x-request-id"]}
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content") or "" for c in mine) == "Hello world"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


async def test_usage_of_tokens_that_were_guessed_ahead(stack: Stack, leader: Leader) -> None:
    """Of all choices; a request without any has no such figures."""
    plain = (await stack.client.post("/v1/completions", json=completion())).json()["usage"]
    assert "completion_tokens_details" not in plain
    leader.plan = Plan(drafted=5, accepted=3)
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await stack.client.post("/v1/completions", json=completion(n=2, **fields))
    whole = await stack.client.post("/v1/completions", json=completion(n=2))
    for usage in (events_of(streamed.text)[-2]["usage"], whole.json()["usage"]):
        assert usage["completion_tokens_details"] == {
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 4,
        }


async def test_completion_with_logprobs(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(logprobs=True)
    for stream in (False, True):
        reply = await stack.client.post(
            "/v1/completions", json=completion(prompt=[1, 2], logprobs=2, stream=stream)
        )
        assert reply.status_code == 200, reply.text
        if stream:
            found = [e["choices"][0]["logprobs"] for e in events_of(reply.text)[:-1]]
            assert [f["text_offset"] for f in found if f] == [[0], [5]]
        else:
            found = reply.json()["choices"][0]["logprobs"]
            assert found["tokens"] == ["Hello", " world"]
            assert found["text_offset"] == [0, 5]
            assert found["top_logprobs"][0] == {"Hello": -0.5, "other": -1.5}


async def test_models_and_unknown_model(stack: Stack) -> None:
    listed = (await stack.client.get("/v1/models")).json()
    (model,) = listed["data"]
    assert (await stack.client.get(f"/v1/models/{model['id']}")).json() == model
    for reply in (
        await stack.client.get("/v1/models/other"),
        await stack.client.post("/v1/completions", json=completion(model="other")),
    ):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("reason", ["client_cancel", "admin"])
async def test_one_that_was_stopped_before_its_leader_had_it_has_no_error(
    stack: Stack, leader: Leader, reason: str
) -> None:
    """Its front had the stop, from another gateway, before this one."""
    leader.plan = Plan(refuse={"status": 409, "message": "no", "code": reason, "param": None})
    for route, make_body in BODIES.items():
        reply = await stack.client.post(route, json=make_body())
        assert reply.status_code == 200
        (choice,) = reply.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", reason)
        found = await stack.client.get(f"/v1/requests/{reply.headers['x-request-id']}")
        assert (found.json()["outcome"], found.json()["reason"]) == ("stopped", reason)
    await stack.quiet()


async def test_refusal_keeps_its_status(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(refuse={"status": 400, "message": "too long", "code": "x", "param": "p"})
    for route, make_body in BODIES.items():
        for stream in (False, True):
            reply = await stack.client.post(route, json=make_body(stream=stream))
            assert reply.status_code == 400
            assert reply.json()["error"]["message"] == "too long"
    await stack.quiet()
