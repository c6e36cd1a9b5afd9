"""Leaders that are not there, that go, and that come back; drain; metrics."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from .conftest import (
    ADMIN,
    SOON_S,
    Make,
    MoreLeaders,
    Stack,
    chat,
    completion,
    events_of,
    eventually,
    free_port,
    write_groups,
)
from .leader import SECRET, Leader, Plan


async def test_no_group_is_a_503_after_a_bound(make: Make) -> None:
    stack = await make([], dispatch_wait_s=0.1)
    for stream in (False, True):
        reply = await stack.client.post("/v1/completions", json=completion(stream=stream))
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
    queue = {"queue": 0.05}
    reply = await stack.client.post("/v1/completions", json=completion(deadlines=queue))
    assert reply.status_code == 429
    ready = await stack.client.get("/readyz")
    assert ready.status_code == 503


async def test_a_request_waits_for_its_leader(
    make: Make, more_leaders: MoreLeaders, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.json"
    write_groups(groups, [])
    stack = await make([], groups_file=str(groups), dispatch_wait_s=60.0)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await stack.until(lambda: len(stack.gateway.table) == 1)
    leader = await more_leaders()
    write_groups(groups, [leader])
    assert (await task).status_code == 200
    assert (await stack.client.get("/readyz")).status_code == 200
    write_groups(groups, [])
    await stack.until(lambda: not stack.gateway.registry.ready())
    assert (await stack.client.get("/readyz")).status_code == 503
    await leader.stop()
    await stack.until(lambda: not stack.gateway.registry.sessions())


@pytest.mark.parametrize("stream", [False, True])
async def test_lost_session_ends_its_requests(stack: Stack, leader: Leader, stream: bool) -> None:
    leader.plan = Plan(chunks=None, pace_s=0.005)
    body = completion(stream=stream)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=body))
    await stack.until(lambda: any(r.first_text_at for r in stack.gateway.table.live()))
    await leader.break_sessions()
    reply = await task
    if stream:
        *_, error, done = events_of(reply.text)
        assert error["error"]["code"] == "rank_lost" and done == "[DONE]"
    else:
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "rank_lost"
    assert len(leader.seen) == 1  # nothing was tried again
    await stack.until(stack.gateway.registry.ready)
    leader.plan = Plan()
    assert (await stack.client.post("/v1/completions", json=body)).status_code == 200


async def test_unresolved_stop_is_asked_for_again_after_a_reconnect(
    make: Make, leader: Leader
) -> None:
    # Only the new session can bring it.
    stack = await make([leader], resend_after_s=60.0, resend_max_s=60.0)
    leader.plan = Plan(chunks=None, pace_s=0.005)
    leader.answer_stops = False
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 1)
    (uid,) = leader.running
    stop = (await stack.client.post(f"/v1/requests/{uid}/cancel")).json()
    await leader.wait_for(lambda: stop["stop_id"] in leader.stops)
    leader.stops.clear()
    leader.answer_stops = True
    await leader.break_sessions()
    await leader.wait_for(lambda: stop["stop_id"] in leader.stops)
    record = stack.gateway.stops._records[stop["stop_id"]]
    await stack.until(lambda: record.resolved)
    await task


async def test_old_epoch_is_ended_by_the_gateway_if_not_by_the_leader(
    make: Make, leader: Leader
) -> None:
    stack = await make([leader], epoch_grace_s=0.05)
    leader.plan = Plan(tokens=False)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 1)
    await leader.send({"type": "epoch", "epoch": None})
    await leader.send({"type": "epoch", "epoch": 8})
    assert (await task).status_code == 503


async def test_draining_leader_takes_nothing_new(make: Make, leader: Leader) -> None:
    stack = await make([leader], dispatch_wait_s=0.1)
    await leader.send({"type": "draining"})
    await stack.until(lambda: not stack.gateway.registry.ready())
    assert (await stack.client.post("/v1/completions", json=completion())).status_code == 503
    assert stack.gateway.registry.sessions()[0].connected


async def test_what_a_draining_group_still_runs_is_stopped_with_a_receipt(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(tokens=False)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 1)
    await leader.send({"type": "draining", "seconds": 0.1})
    reply = await task
    assert reply.status_code == 503, reply.text
    assert reply.json()["error"]["code"] == "drain"
    request = (await stack.client.get(f"/v1/requests/{reply.headers['x-request-id']}")).json()
    (stop_id,) = request["stop_ids"]
    receipt = (await stack.client.get(f"/v1/stops/{stop_id}")).json()
    assert receipt["reason"] == "drain"
    assert len(receipt["groups"][0]["ranks"]) == 2


@pytest.mark.parametrize(("name", "status"), [("queue", 429), ("first_token", 504), ("total", 504)])
async def test_deadlines_hold_while_no_group_is_ready(
    make: Make, leader: Leader, name: str, status: int
) -> None:
    stack = await make([leader], dispatch_wait_s=30.0)
    await leader.send({"type": "draining", "seconds": 60.0})
    await stack.until(lambda: not stack.gateway.registry.ready())
    body = completion() | {"deadlines": {name: 0.05}}
    assert (await stack.client.post("/v1/completions", json=body)).status_code == status


async def test_load_is_one_series_per_group(stack: Stack, leader: Leader) -> None:
    await leader.send(
        {"type": "load", "running": 3, "waiting": 2, "free": 90, "held": 8, "cached": 2}
    )
    name, group = "stopway_requests_running", {"group": "g0"}
    await stack.until(lambda: stack.metric(name, **group) == 3)
    text = (await stack.client.get("/metrics")).text
    found = re.findall(r"^stopway_requests_running(\{...*\})? (\S+)", text, re.MULTILINE)
    assert found == [('{group="g0"}', "3.0")]
    assert 'stopway_kv_blocks{group="g0",state="held"} 8.0' in text


async def test_draft_counters_go_on_over_epochs_and_sessions(stack: Stack, leader: Leader) -> None:
    def counted() -> tuple[float, float]:
        names = ("stopway_draft_tokens_total", "stopway_accepted_draft_tokens_total")
        drafted, accepted = (stack.metric(name, group="g0") for name in names)
        return drafted, accepted

    async def load(drafted: int, accepted: int) -> None:
        await leader.send({"type": "load", "drafted": drafted, "accepted": accepted})

    await load(10, 6)
    await stack.until(lambda: counted() == (10, 6))
    await load(14, 7)
    await stack.until(lambda: counted() == (14, 7))
    # The leader's link breaks and comes back, and then the session: the same epoch goes on.
    for epoch in (None, 7):
        await leader.send({"type": "epoch", "epoch": epoch})
        await load(0, 0)
    await leader.break_sessions()
    await leader.wait_for(lambda: leader._sockets)
    await load(15, 8)
    await stack.until(lambda: counted() == (15, 8))
    await leader.send({"type": "epoch", "epoch": 8})
    await load(2, 1)
    await stack.until(lambda: counted() == (17, 9))


async def test_least_busy_group_takes_the_next(make: Make, leader: Leader, second: Leader) -> None:
    stack = await make([leader, second])
    for each in (leader, second):
        each.plan = Plan(tokens=False)
    sizes = (1000, 10, 10, 10)
    tasks = []
    for number, size in enumerate(sizes):
        body = completion(max_tokens=size)
        tasks.append(asyncio.create_task(stack.client.post("/v1/completions", json=body)))
        await stack.until(lambda n=number: len(leader.running + second.running) == n + 1)
    assert sorted((len(leader.running), len(second.running))) == [1, 3]
    await stack.client.post("/v1/stops", json={"all": True})
    await asyncio.gather(*tasks)


async def test_keepalive_comments(make: Make, leader: Leader) -> None:
    stack = await make([leader], keepalive_s=0.05, stream_open_s=0.05)
    leader.plan = Plan(accept=False)
    request = stack.client.build_request("POST", "/v1/completions", json=completion(stream=True))
    reply = await stack.client.send(request, stream=True)
    lines = reply.aiter_lines()
    assert await anext(lines) == ": keepalive"
    await reply.aclose()
    await stack.quiet()


async def test_a_pod_that_is_listed_again_takes_what_waits(
    make: Make, leader: Leader, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.json"
    write_groups(groups, [leader])
    stack = await make([leader], groups_file=str(groups))
    leader.plan = Plan(tokens=False)
    first = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 1)
    write_groups(groups, [])
    await stack.until(lambda: not stack.gateway.registry.ready())
    second = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await stack.until(lambda: len(stack.gateway.table) == 2)
    write_groups(groups, [leader])
    await leader.wait_for(lambda: len(leader.running) == 2)
    await stack.client.post("/v1/stops", json={"all": True})
    assert [(await task).status_code for task in (first, second)] == [200, 200]


async def test_drain_refuses_and_lets_finish(make: Make, leader: Leader) -> None:
    """Its time is longer than this test waits for anything: it ends because all have finished."""
    stack = await make([leader], drain_s=10 * SOON_S)
    leader.plan = Plan(tokens=False)
    last = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 1)
    stack.server.begin_drain()
    await stack.until(lambda: stack.gateway.draining)
    assert (await stack.client.get("/readyz")).status_code == 503
    refused = await stack.client.post("/v1/completions", json=completion())
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "drain"
    (uid,) = leader.running
    await leader._end(leader.jobs[uid], "eos", "finished", "stop")
    assert (await last).json()["choices"][0]["finish_reason"] == "stop"
    await stack.until(lambda: stack.server.should_exit)
    assert not leader.stops


async def test_drain_stops_what_has_not_finished_in_time(make: Make, leader: Leader) -> None:
    stack = await make([leader], drain_s=0.1)
    leader.plan = Plan(chunks=None, pace_s=0.005)
    streamed = asyncio.create_task(
        stack.client.post("/v1/chat/completions", json=chat(stream=True))
    )
    whole = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: len(leader.running) == 2)
    stack.server.begin_drain()
    assert events_of((await streamed).text)[-2]["choices"][0]["stop_reason"] == "drain"
    assert (await whole).status_code == 503
    await stack.until(lambda: stack.server.should_exit)


@asynccontextmanager
async def gateway_process(**environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python -m stopway_gateway``; gone afterwards."""
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stopway_gateway", env=env, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_process_starts_and_drains_on_sigterm(leader: Leader, tmp_path: Path) -> None:
    groups = tmp_path / "groups.json"
    write_groups(groups, [leader])
    port = free_port()
    leader.plan = Plan(chunks=None, pace_s=0.005)
    url = f"http://127.0.0.1:{port}"
    async with (
        gateway_process(
            STOPWAY_BIND_HOST="127.0.0.1",
            STOPWAY_PORT=str(port),
            STOPWAY_API_KEYS="acme:admin=admin-key",
            STOPWAY_SECRET=SECRET,
            STOPWAY_GROUPS_FILE=str(groups),
            STOPWAY_DRAIN_S="0.3",
            STOPWAY_REDIS_URL="",
        ) as process,
        httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=SOON_S, trust_env=False) as client,
    ):

        async def ready() -> bool:
            try:
                return (await client.get("/readyz")).status_code == 200
            except httpx.TransportError:
                assert process.returncode is None, "the gateway has ended"
                return False

        await eventually(ready)
        task = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
        await leader.wait_for(lambda: len(leader.running) == 1)
        process.send_signal(signal.SIGTERM)
        assert events_of((await task).text)[-2]["choices"][0]["stop_reason"] == "drain"
        async with asyncio.timeout(SOON_S):
            _, errors = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in errors
    (message,) = (leader.jobs[uid].message for uid in leader.seen)
    assert message["tenant"] == "acme"
    assert b"Exception" not in errors
