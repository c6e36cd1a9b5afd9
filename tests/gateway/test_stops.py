"""Cancels and stops: what the client sees, what the receipt says, who may do what."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from .conftest import (
    ACME,
    ADMIN,
    BETA,
    BODIES,
    Make,
    MoreLeaders,
    Stack,
    chat,
    completion,
    events_of,
    eventually,
)
from .leader import Leader, Plan


async def start(stack: Stack, body: dict[str, Any], headers: dict[str, str] = ADMIN) -> Any:
    """A request under way, and the task of its reply."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    before = {r.uid for r in stack.gateway.table.live()}
    task = asyncio.create_task(stack.client.post(path, json=body, headers=headers))
    (uid,) = await stack.until(lambda: {r.uid for r in stack.gateway.table.live()} - before)
    return uid, task


@pytest.fixture
async def endless(leader: Leader) -> Leader:
    """A leader whose requests go on until they are stopped."""
    leader.plan = Plan(chunks=None, pace_s=0.005)
    return leader


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_cancel_gives_the_partial_text_and_a_receipt(
    stack: Stack, endless: Leader, route: str, stream: bool
) -> None:
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    uid, task = await start(stack, BODIES[route](stream=stream, **fields))
    await endless.wait_for(lambda: uid in endless.jobs and endless.jobs[uid].sent[0] >= 3)
    asked_at = time.time()
    reply = await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")
    assert reply.status_code == 200
    receipt = reply.json()
    assert receipt["status"] == "reclaimed" and receipt["outcome"] == "stopped"
    assert receipt["reason"] == "client_cancel" and receipt["request_ids"] == [uid]
    assert receipt["count"] == 1 and receipt["pending_on"] == []
    (group,) = receipt["groups"]
    assert set(group) == {
        "group",
        "epoch",
        "turn_effective",
        "tokens_discarded",
        "blocks_reclaimed",
        "blocks_cached",
        "blocks_lent",
        "ranks",
    }
    assert (group["group"], group["epoch"], group["blocks_reclaimed"]) == ("g0", 7, 2)
    assert [rank["rank"] for rank in group["ranks"]] == [0, 1]
    noticed = [rank["noticed_at"] for rank in group["ranks"]]
    assert asked_at <= receipt["accepted_at"] <= min(noticed)
    answer = await task
    assert answer.status_code == 200
    if stream:
        *_, last, usage, done = events_of(answer.text)
        assert done == "[DONE]"
        choice, used = last["choices"][0], usage["usage"]
    else:
        choice, used = answer.json()["choices"][0], answer.json()["usage"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text.startswith("t0 t1 t2 ")
        assert used["completion_tokens"] == text.count("t")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "client_cancel")
    computed = endless.jobs[uid].sent[0] + 1
    assert used["completion_tokens"] + used["stopway"]["discarded_tokens"] == computed
    seen = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert seen["stop_ids"] == [receipt["stop_id"]] and seen["outcome"] == "stopped"
    assert receipt["trace_id"] == seen["trace_id"]
    again = (await stack.client.get(f"/v1/stops/{receipt['stop_id']}")).json()
    assert again == receipt


async def test_delivery_is_cut_at_once_and_ends_without_the_leader(
    make: Make, endless: Leader
) -> None:
    stack = await make([endless], cut_wait_s=1.0)
    endless.answer_stops = False  # it goes on sending, and says nothing
    request = stack.client.build_request(
        "POST", "/v1/completions", json=completion(stream=True, max_tokens=1000)
    )
    reply = await stack.client.send(request, stream=True)
    uid = reply.headers["x-request-id"]
    lines = reply.aiter_lines()
    while "t2" not in await anext(lines):
        pass
    cancelled = await stack.client.post(f"/v1/requests/{uid}/cancel")
    assert cancelled.json()["status"] == "accepted"
    accepted_at = endless.jobs[uid].sent[0]
    await endless.wait_for(lambda: endless.jobs[uid].sent[0] > accepted_at)
    rest = [line async for line in lines if line.startswith("data: ")]
    await reply.aclose()
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort","stop_reason":"client_cancel"' in rest[-2]
    # What was on its way when the stop was accepted may still come; nothing that came after.
    texts = [line for line in rest[:-2] if '"text":"t' in line]
    assert len(texts) <= accepted_at


async def test_finished_just_before_the_stop_is_delivered_whole(make: Make, leader: Leader) -> None:
    stack = await make([leader], cut_wait_s=60.0)  # the leader's word comes first
    leader.plan = Plan(tokens=False)
    leader.answer_stops = False
    uid, task = await start(stack, completion(stream=True))
    await leader.wait_for(lambda: uid in leader.jobs)
    await stack.client.post(f"/v1/requests/{uid}/cancel")
    item = {"uid": uid, "index": 0, "text": "all of it", "tokens": 3, "logprobs": None}
    await leader.send({"type": "out", "items": [item]})
    await leader._end(leader.jobs[uid], "eos", "finished", "stop")
    *chunks, done = events_of((await task).text)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "all of it"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_wait_runs_out_with_what_remains(stack: Stack, endless: Leader) -> None:
    endless.hold_stage = "reclaimed"
    endless.pending_on = ["transfer t1"]
    uid, task = await start(stack, chat())
    await endless.wait_for(lambda: uid in endless.jobs)
    reply = await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed&timeout=2")
    assert reply.status_code == 202
    assert reply.json()["status"] == "stopped"
    assert reply.json()["pending_on"] == ["transfer t1"]
    reply = await stack.client.post(f"/v1/requests/{uid}/cancel?wait=stopped")
    assert reply.status_code == 200
    await endless.release()
    first = (await stack.client.get(f"/v1/requests/{uid}")).json()["stop_ids"][0]

    async def reclaimed() -> bool:
        return (await stack.client.get(f"/v1/stops/{first}")).json()["status"] == "reclaimed"

    await eventually(reclaimed)
    await task


async def test_case_g11_cancel_of_unknown_finished_twice_early_and_foreign(
    make: Make, leader: Leader
) -> None:
    stack = await make([leader])
    for uid in (stack.gateway.table.new_uid(), "req-1-other-2", "no such id", "x" * 500):
        reply = await stack.client.post(f"/v1/requests/{uid}/cancel")
        assert reply.status_code == 404, (uid, reply.text)
        assert reply.json()["error"]["type"] == "not_found_error"

    done = (await stack.client.post("/v1/completions", json=completion(), headers=ACME)).json()
    cancel = f"/v1/requests/{done['id']}/cancel?wait=reclaimed"
    reply = await stack.client.post(cancel, headers=BETA)
    assert reply.status_code == 404
    assert (await stack.client.get(f"/v1/requests/{done['id']}", headers=BETA)).status_code == 404
    for headers in (ACME, ACME, ADMIN):
        reply = await stack.client.post(cancel, headers=headers)
        assert reply.status_code == 200
        assert reply.json()["status"] == "already_finished"
        assert reply.json()["outcome"] == "finished"

    leader.plan = Plan(chunks=None, pace_s=0.005)
    uid, task = await start(stack, chat(), ACME)
    await leader.wait_for(lambda: uid in leader.jobs)
    assert (await stack.client.post(f"/v1/requests/{uid}/cancel", headers=BETA)).status_code == 404
    both = await asyncio.gather(
        *(
            stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed", headers=ACME)
            for _ in range(2)
        )
    )
    assert [reply.status_code for reply in both] == [200, 200]
    assert {reply.json()["outcome"] for reply in both} == {"stopped"}
    assert (await task).json()["choices"][0]["stop_reason"] == "client_cancel"


async def test_case_g11_stop_before_any_leader_has_it(make: Make) -> None:
    stack = await make([])
    for stream in (False, True):
        uid, task = await start(stack, completion(stream=stream), ACME)
        reply = await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed", headers=ACME)
        assert reply.status_code == 200
        receipt = reply.json()
        assert (receipt["status"], receipt["outcome"]) == ("reclaimed", "stopped")
        assert receipt["groups"][0]["group"].startswith("gateway:")
        answer = await task
        assert answer.status_code == 200
        last = events_of(answer.text)[-2] if stream else answer.json()
        assert last["choices"][0]["stop_reason"] == "client_cancel"


async def test_an_id_that_nobody_knows_is_a_404_however_late_that_is_said(
    make: Make, leader: Leader
) -> None:
    leader.answer_stops = False
    stack = await make([leader], unknown_wait_s=1e-6)
    cancel = "/v1/requests/req-1-other-2/cancel?wait=reclaimed&timeout=60"
    task = asyncio.create_task(stack.client.post(cancel))
    await leader.wait_for(lambda: leader.stops)
    (signed,) = leader.stops.values()
    await leader._answer(signed)
    reply = await task
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")


async def test_selectors_reach_what_they_may(
    make: Make, leader: Leader, more_leaders: MoreLeaders
) -> None:
    second = await more_leaders("g1", ranks=1)
    stack = await make([leader, second])
    for each in (leader, second):
        each.plan = Plan(chunks=None, pace_s=0.005)
    talk = {"metadata": {"conversation_id": "c1"}}
    acme = [await start(stack, completion(**talk), ACME) for _ in range(2)]
    beta, beta_task = await start(stack, completion(**talk), BETA)
    await stack.until(lambda: len(leader.running + second.running) == 3)
    # One conversation is at one group.
    assert len({stack.gateway.table._live[uid].group for uid, _ in acme}) == 1

    async def stop(headers: dict[str, str], **body: Any) -> Any:
        body = {"wait": "reclaimed", **body}
        return await stack.client.post("/v1/stops", json=body, headers=headers)

    for body, status in (
        ({}, 400),
        ({"all": True, "tenant": "acme"}, 400),
        ({"all": False}, 400),
        ({"conversation": "c1", "reason": "admin"}, 403),
        ({"tenant": "beta"}, 404),
        ({"conversation": "c1", "wait": "sometime"}, 400),
        ({"conversation": "c1", "timeout": -1}, 400),
        ({"request_ids": []}, 400),
        ({"request_ids": [beta]}, 404),
    ):
        reply = await stop(ACME, **body)
        assert (reply.status_code, "error" in reply.json()) == (status, True), body

    reply = await stop(ACME, conversation="c1")
    assert reply.status_code == 200, reply.text
    receipt = reply.json()
    assert receipt["count"] == 2 and set(receipt["request_ids"]) == {uid for uid, _ in acme}
    assert receipt["outcome"] == {"finished": 0, "stopped": 2, "failed": 0}
    assert [(await task).status_code for _, task in acme] == [200, 200]
    assert not beta_task.done()
    # Selectors travel as they are, to every group.
    for each in (leader, second):
        assert each.stops[receipt["stop_id"]]["target"] == {"conversation": "c1"}

    reply = await stop(ADMIN, all=True)
    assert reply.json()["reason"] == "admin" and beta in reply.json()["request_ids"]
    assert (await beta_task).json()["choices"][0]["stop_reason"] == "admin"
    assert (await stop(ADMIN, tenant="acme", reason="drain")).json()["status"] == "already_finished"


async def test_several_ids_in_two_states(stack: Stack, endless: Leader) -> None:
    running, task = await start(stack, completion())
    await endless.wait_for(lambda: running in endless.jobs)
    endless.plan = Plan()
    done = (await stack.client.post("/v1/completions", json=completion())).json()["id"]
    body = {"request_ids": [running, done], "wait": "reclaimed"}
    receipt = (await stack.client.post("/v1/stops", json=body)).json()
    assert receipt["count"] == 2 and receipt["status"] == "reclaimed"
    assert receipt["outcome"] == {"finished": 1, "stopped": 1, "failed": 0}
    await task


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("deadline_queue", 429),
        ("deadline_ttft", 504),
        ("deadline_total", 504),
        ("drain", 503),
        ("rank_lost", 503),
        ("bad_input", 400),
        ("engine_error", 500),
        ("admin", 200),
    ],
)
async def test_status_of_each_reason(
    stack: Stack, leader: Leader, reason: str, status: int
) -> None:
    failed = reason in ("rank_lost", "bad_input", "engine_error")
    leader.plan = Plan(
        reason=reason, outcome="failed" if failed else "stopped", finish_reason="abort"
    )
    reply = await stack.client.post("/v1/completions", json=completion())
    assert reply.status_code == status
    if status != 200:
        assert reply.json()["error"]["code"] == reason
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    streamed = await stack.client.post("/v1/completions", json=completion(stream=True))
    *_, last, done = events_of(streamed.text)
    assert done == "[DONE]"
    if failed:
        assert last["error"]["code"] == reason
    else:
        assert last["choices"][0]["stop_reason"] == reason


@pytest.mark.parametrize("reason", ["deadline_queue", "deadline_ttft", "deadline_total"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_of_the_service_ends_what_asked_for_none(
    stack: Stack, leader: Leader, reason: str, stream: bool
) -> None:
    leader.plan = Plan(accept=False)
    uid, task = await start(stack, completion(stream=stream))
    await leader.wait_for(lambda: uid in leader.jobs)
    assert set(leader.jobs[uid].message["deadlines"].values()) == {None}
    await leader._end(leader.jobs[uid], reason, "stopped")
    reply = await task
    assert reply.status_code == (429 if reason == "deadline_queue" else 504)
    assert reply.json()["error"]["code"] == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_cuts_every_choice(make: Make, endless: Leader, stream: bool) -> None:
    stack = await make([endless], cut_wait_s=1.0)
    endless.answer_stops = False  # its choices go on, and none of that is delivered
    uid, task = await start(stack, completion(stream=stream, n=3))
    await endless.wait_for(lambda: uid in endless.jobs and min(endless.jobs[uid].sent) >= 3)
    await stack.client.post(f"/v1/requests/{uid}/cancel")
    at_most = max(endless.jobs[uid].sent) + 1
    await endless.wait_for(lambda: min(endless.jobs[uid].sent) > at_most)
    reply = await task
    if stream:
        chunks = [chunk["choices"][0] for chunk in events_of(reply.text)[:-1]]
    else:
        chunks = reply.json()["choices"]
    ends = [c for c in chunks if c["finish_reason"] is not None]
    assert sorted(c["index"] for c in ends) == [0, 1, 2]
    assert {(c["finish_reason"], c["stop_reason"]) for c in ends} == {("abort", "client_cancel")}
    for index in range(3):
        text = "".join(c["text"] for c in chunks if c["index"] == index)
        assert 3 <= text.count("t") <= at_most


async def test_stops_are_signed_and_counted(stack: Stack, endless: Leader) -> None:
    uid, task = await start(stack, completion())
    await endless.wait_for(lambda: uid in endless.jobs)
    receipt = (await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")).json()
    await task
    assert (receipt["stop_id"], "session") in endless.stop_ways
    assert endless.stops[receipt["stop_id"]]["sequence"] == 0  # not in any stream
    assert stack.metric("stopway_stop_signals_total", reason="client_cancel") == 1
    labels = {"outcome": "stopped", "reason": "client_cancel"}
    assert stack.metric("stopway_request_outcomes_total", **labels) == 1
    for phase in ("notify", "in_flight", "reclaim"):
        assert stack.metric("stopway_stop_phase_seconds_count", phase=phase) == 1


async def test_a_stop_that_overtakes_its_request_is_not_resolved_by_unknown(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(accept=False)
    leader.answer_stops = False
    uid, task = await start(stack, completion())
    await leader.wait_for(lambda: uid in leader.jobs)
    waiting = asyncio.create_task(stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed"))
    await leader.wait_for(lambda: leader.stops)
    (signed,) = leader.stops.values()
    none = {"finished": 0, "stopped": 0, "failed": 0, "unknown": 1}
    await leader.send_receipt(signed, "reclaimed", [], none)
    record = stack.gateway.stops._records[signed["stop_id"]]
    await stack.until(lambda: record.parts["g0"].unknown)
    assert not record.resolved and not waiting.done()
    await leader._end(leader.jobs[uid], "client_cancel", "stopped")
    await task  # the client has its answer; the receipt still waits for its proof
    assert not record.resolved and not waiting.done()
    stopped = {"finished": 0, "stopped": 1, "failed": 0, "unknown": 0}
    for status in ("stopped", "reclaimed"):
        await leader.send_receipt(signed, status, [leader.jobs[uid]], stopped)
    receipt = (await waiting).json()
    assert (receipt["status"], receipt["outcome"]) == ("reclaimed", "stopped")
    assert receipt["groups"][0]["blocks_reclaimed"] == 2


async def test_a_stop_outlives_the_leader_that_put_it_in_a_turn(
    stack: Stack, leader: Leader
) -> None:
    """Its pod is replaced: that the next knows nothing of the stop proves the old one gone."""
    leader.plan = Plan(tokens=False)
    leader.answer_stops = False
    uid, task = await start(stack, completion())
    await leader.wait_for(lambda: uid in leader.running)
    waiting = asyncio.create_task(stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed"))
    await leader.wait_for(lambda: leader.stops)
    (signed,) = leader.stops.values()
    stopped = {"finished": 0, "stopped": 1, "failed": 0, "unknown": 0}
    await leader.send_receipt(signed, "stopped", [leader.jobs[uid]], stopped)
    await leader._end(leader.jobs[uid], "client_cancel", "stopped")
    await task
    assert not waiting.done()
    assert leader.epoch is not None
    leader.epoch += 1
    none = {"finished": 0, "stopped": 0, "failed": 0, "unknown": 1}
    await leader.send_receipt(signed, "stopped", [], none)
    assert not waiting.done()
    await leader.send_receipt(signed, "reclaimed", [], none)
    receipt = (await waiting).json()
    assert (receipt["status"], receipt["outcome"]) == ("reclaimed", "stopped")
    assert [part["rank"] for part in receipt["groups"][0]["ranks"]] == [0, 1]
