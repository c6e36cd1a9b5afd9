"""Stops over Redis: a real server, sometimes behind a proxy that is slow or dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from stopway_core import names
from stopway_core.signing import sign
from stopway_core.types import Reason, Stop, Target
from stopway_gateway.stop_bus import Gaps, Publisher, Reader, connect

from .conftest import (
    ACME,
    ADMIN,
    BETA,
    SOON_S,
    Make,
    Stack,
    completion,
    eventually,
    free_port,
    redis_server,
)
from .leader import SECRET, Leader, Plan


class Proxy:
    """TCP, forwarded with a delay; ``frozen`` swallows everything."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self._port = port
        self.delay_s = delay_s
        self.frozen = False
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, up_writer))
                group.create_task(self._pump(up_reader, writer))
        finally:
            writer.close()
            up_writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await asyncio.sleep(self.delay_s)
                if not self.frozen:
                    sink.write(data)
                    await sink.drain()
        sink.close()


@asynccontextmanager
async def proxied(redis_url: str, delay_s: float = 0.0) -> AsyncIterator[Proxy]:
    """A proxy in front of the Redis at ``redis_url``."""
    proxy = Proxy(int(redis_url.split(":")[-1].split("/")[0]), delay_s)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        yield proxy
    finally:
        server.close()


@asynccontextmanager
async def follower(redis_url: str, leader: Leader, service: str) -> AsyncIterator[None]:
    """Brings what the group's stream carries to the leader, as its pod's reader does."""
    tasks: set[asyncio.Task[None]] = set()

    def take(fields: dict[str, str]) -> None:
        tasks.add(asyncio.create_task(leader.take_stop(json.loads(fields["stop"]), "redis")))

    reader = Reader(redis_url, {names.stops_stream(service, leader.group): take})
    reader.start()
    try:
        await positioned(reader)
        yield
    finally:
        await reader.close()


async def positioned(reader: Reader) -> None:
    """The reader knows where it begins."""
    async with asyncio.timeout(SOON_S):
        await reader.positioned.wait()


def service_of(request: pytest.FixtureRequest) -> str:
    """A service of its own for each test, so that they share a Redis and no stream."""
    return request.node.name[:40]


async def running(stack: Stack, leader: Leader, headers: Any = ACME) -> tuple[str, Any]:
    """An endless request at the leader."""
    leader.plan = Plan(chunks=None, pace_s=0.005)
    before = set(leader.running)
    task = asyncio.create_task(
        stack.client.post("/v1/completions", json=completion(), headers=headers)
    )
    await leader.wait_for(lambda: set(leader.running) - before)
    (uid,) = set(leader.running) - before
    await stack.until(lambda: any(r.uid == uid and r.accepted for r in stack.gateway.table.live()))
    return uid, task


async def test_a_stop_travels_through_redis_once(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    service = service_of(request)
    stack = await make([leader], redis_url=redis_url, service_uid=service, resend_after_s=5)
    async with follower(redis_url, leader, service):
        for number in (1, 2):
            uid, task = await running(stack, leader)
            receipt = (await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")).json()
            assert receipt["status"] == "reclaimed"
            await task
            assert leader.stop_ways[-1] == (receipt["stop_id"], "redis")
            assert leader.stops[receipt["stop_id"]]["sequence"] == number
    assert len(leader.stop_ways) == 2


async def test_resent_directly_when_nobody_reads_the_stream(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    service = service_of(request)
    stack = await make([leader], redis_url=redis_url, service_uid=service, resend_after_s=0.05)
    uid, task = await running(stack, leader)
    started = time.monotonic()
    receipt = (await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")).json()
    assert receipt["status"] == "reclaimed" and time.monotonic() - started >= 0.05
    assert set(leader.stop_ways) == {(receipt["stop_id"], "post")}
    await task


@pytest.mark.parametrize("how", ["refused", "frozen"])
async def test_losing_redis_delays_no_stop(
    make: Make, leader: Leader, tmp_path: Path, how: str
) -> None:
    with redis_server(tmp_path, free_port()) as url:
        async with proxied(url) as proxy:
            stack = await make([leader], redis_url=proxy.url, resend_after_s=0.1)
            proxy.frozen = True
            if how == "refused":
                # The connections end and no new one gets an answer.
                await stack.gateway.stops.publisher.close()
                stack.gateway.stops.publisher._task = None
                assert not stack.gateway.stops.publisher.healthy
            for _ in range(3):
                uid, task = await running(stack, leader)
                reply = await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")
                assert reply.status_code == 200 and reply.json()["status"] == "reclaimed"
                ways = [
                    way for stop_id, way in leader.stop_ways if stop_id == reply.json()["stop_id"]
                ]
                # A frozen one looks well until a command has had its time.
                assert ways[0] == "session" or (how, ways[0]) == ("frozen", "post")
                await task


async def test_redis_comes_back(make: Make, leader: Leader, tmp_path: Path) -> None:
    port = free_port()
    with redis_server(tmp_path, port) as url:
        stack = await make([leader], redis_url=url)
    bus = stack.gateway.stops.publisher
    uid, task = await running(stack, leader)
    assert (await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")).status_code == 200
    await task
    await stack.until(lambda: not bus.healthy)
    with redis_server(tmp_path, port) as url:
        await stack.until(lambda: bus.healthy)
        async with follower(url, leader, "local"):
            uid, task = await running(stack, leader)
            reply = await stack.client.post(f"/v1/requests/{uid}/cancel?wait=reclaimed")
            assert reply.json()["status"] == "reclaimed"
            await task
        assert stack.metric("stopway_stop_bus_up") == 1


async def test_case_g01_cancelled_command_leaves_no_reply_behind(redis_url: str) -> None:
    async with proxied(redis_url, delay_s=0.1) as proxy:
        client = connect(proxy.url)
        await client.ping()
        for number in range(5):
            task = asyncio.create_task(client.echo(f"first {number}"))
            await asyncio.sleep(0.05)  # sent, and its reply on its way
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await client.echo(f"second {number}") == f"second {number}"
        await client.aclose()


async def test_case_g02_cancelled_reader_takes_its_connection_along(redis_url: str) -> None:
    async def readers(client: Any) -> int:
        return sum(c["cmd"] == "xread" for c in await client.client_list())

    client = connect(redis_url)

    async def are(count: int) -> bool:
        return await readers(client) == count

    await eventually(lambda: are(0))  # those of other tests have gone
    reader = Reader(redis_url, {"g02": lambda fields: None})
    reader.start()
    await eventually(lambda: are(1))
    await reader.close()
    assert await client.echo("mine") == "mine"
    await eventually(lambda: are(0))
    await client.aclose()


async def test_one_cancel_ends_a_loop_of_commands(redis_url: str) -> None:
    """redis-py may swallow a cancel; neither loop goes on, whenever it comes."""
    stop = Stop("s", Target(everything=True), Reason.ADMIN, "default", True, time.time())
    for number in range(20):
        publisher = Publisher(redis_url, "p", SECRET, 900.0, lambda _: None)
        publisher.start()
        reader = Reader(redis_url, {"cancels": lambda fields: None})
        reader.start()
        async with asyncio.timeout(SOON_S):
            while not (publisher.healthy and reader.positioned.is_set()):
                await asyncio.sleep(0.002)
        ends = time.monotonic() + 0.005 + number * 0.0005
        while time.monotonic() < ends:  # both are always in a command, or just between two
            publisher.publish(stop, "cancels", lambda: None)
            await asyncio.sleep(0)
        tasks = [task for task in (publisher._task, reader._task) if task is not None]
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=Reader.BLOCK_S + SOON_S)
        await asyncio.gather(publisher.close(), reader.close())
        assert not left


def entry(number: int, target: Target | None = None, **fields: Any) -> dict[str, str]:
    """A signed stop of another gateway, numbered."""
    stop = Stop(
        stop_id=f"stop-{number}",
        target=target or Target(conversation="nobody"),
        reason=Reason.ADMIN,
        tenant="default",
        admin=True,
        issued_at=time.time() - fields.get("age_s", 0.0),
        publisher="other-gateway",
        sequence=number,
    )
    return {"stop": json.dumps(sign(stop, fields.get("secret", SECRET)))}


async def test_case_g03_a_gap_is_declared_and_the_missed_stops_take_effect(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    service = service_of(request)
    stack = await make([leader], redis_url=redis_url, service_uid=service, resend_after_s=0.05)
    stream = names.gateway_stops_stream(service)
    client = connect(redis_url)
    for number in (1, 2, 3):
        await client.xadd(stream, entry(number))
    # The reader stands at 3 while 4..10 come and all but the newest 2 are trimmed, at once.
    gaps = stack.gateway.stops._gaps
    await stack.until(lambda: gaps._last.get("other-gateway") == 3)
    pipe = client.pipeline(transaction=True)
    for number in range(4, 11):
        pipe.xadd(stream, entry(number))
    pipe.xtrim(stream, maxlen=2, approximate=False)
    await pipe.execute()
    await stack.until(lambda: gaps._last.get("other-gateway") == 10)
    assert stack.metric("stopway_stop_stream_gaps_total") == 5

    # The leader's stream loses every entry, and each stop reaches it all the same.
    tasks = [await running(stack, leader) for _ in range(5)]
    ids = []
    for uid, _ in tasks:
        ids.append((await stack.client.post(f"/v1/requests/{uid}/cancel")).json()["stop_id"])
        await client.delete(names.stops_stream(service, "g0"))
    await stack.until(lambda: all(stack.gateway.stops._records[i].resolved for i in ids))
    assert [(await task).status_code for _, task in tasks] == [200] * 5
    await client.aclose()


async def test_case_g04_two_entries_of_one_millisecond(redis_url: str) -> None:
    client = connect(redis_url)
    await client.xadd("g04", {"stop": "old"}, id="1000-0")
    seen: list[str] = []
    reader = Reader(redis_url, {"g04": lambda fields: seen.append(fields["stop"])})
    reader.start()
    await positioned(reader)
    for number in range(5):
        await client.xadd("g04", {"stop": str(number)}, id=f"1001-{number}")
        async with asyncio.timeout(SOON_S):
            while len(seen) <= number:  # the reader stands on each of them in turn
                await asyncio.sleep(0.002)
    assert seen == ["0", "1", "2", "3", "4"]
    await reader.close()
    await client.aclose()


def test_gaps_are_counted_per_publisher() -> None:
    gaps = Gaps()
    seen = [("a", 5), ("b", 1), ("a", 6), ("a", 6), ("b", 4), ("a", 3), ("a", 8)]
    assert [gaps.missed(*each) for each in seen] == [0, 0, 0, 0, 2, 0, 1]


async def test_bad_entries_are_counted_and_passed_over(
    make: Make, redis_url: str, request: pytest.FixtureRequest
) -> None:
    service = service_of(request)
    stack = await make([], redis_url=redis_url, service_uid=service)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await stack.until(lambda: len(stack.gateway.table) == 1)
    client = connect(redis_url)
    stream = names.gateway_stops_stream(service)
    everything = Target(everything=True)
    for fields in (
        {"other": "x"},
        {"stop": "not json"},
        {"stop": "[" * 5000},
        {"stop": "{}"},
        entry(1, everything, secret="wrong"),
    ):
        await client.xadd(stream, fields)
    await client.xadd(names.receipts_stream(service), {"receipt": '{"stop_id": 1}'})
    await client.xadd(names.receipts_stream(service), {"receipt": "[]"})
    await stack.until(lambda: stack.metric("stopway_stop_bad_entries_total") == 7)
    assert not task.done()
    await client.xadd(stream, entry(2, everything))
    reply = await task
    assert reply.json()["choices"][0]["stop_reason"] == "admin"
    await client.aclose()


async def test_the_other_gateway(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    """A stop for what another gateway runs, queues, has finished, or never had."""
    shared = {"redis_url": redis_url, "service_uid": service_of(request)}
    one = await make([leader], gateway_id="one", **shared)
    two = await make([leader], gateway_id="two", unknown_wait_s=SOON_S, **shared)
    hasty = await make([leader], gateway_id="hasty", unknown_wait_s=0.1, **shared)
    uid, task = await running(one, leader)
    path = f"/v1/requests/{uid}/cancel?wait=reclaimed"
    assert (await hasty.client.post(path, headers=BETA)).status_code == 404
    reply = await two.client.post(path, headers=ACME)
    assert (reply.status_code, reply.json()["outcome"]) == (200, "stopped")
    assert (await task).json()["choices"][0]["stop_reason"] == "client_cancel"

    nobodys = "/v1/requests/req-1-one-00/cancel?wait=reclaimed"
    assert (await hasty.client.post(nobodys)).status_code == 404

    leader.epoch = None
    await leader.send({"type": "epoch", "epoch": None})
    await one.until(lambda: not one.gateway.registry.ready())
    queued = asyncio.create_task(
        one.client.post("/v1/completions", json=completion(), headers=ACME)
    )
    (waiting,) = await one.until(lambda: [r.uid for r in one.gateway.table.live()])
    reply = await two.client.post(f"/v1/requests/{waiting}/cancel?wait=reclaimed", headers=ACME)
    assert (reply.status_code, reply.json()["status"]) == (200, "reclaimed")
    assert (await queued).json()["choices"][0]["stop_reason"] == "client_cancel"


async def test_receipts_of_another_gateways_stop_are_readable_by_who_asked(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    service = service_of(request)
    stack = await make([], redis_url=redis_url, service_uid=service)
    trace_id = "ab" * 16
    rank = {"rank": 0, "stage": 0, "node": "n", "turn_noticed": 4}
    times = {"noticed_at": 5.0, "stopped_at": 5.1, "reclaimed_at": 5.2}
    receipt = {
        "stop_id": "stop-elsewhere",
        "group": "g7",
        "epoch": 3,
        "status": "reclaimed",
        "reason": "client_cancel",
        "tenant": "acme",
        "trace_id": trace_id,
        "outcome": {"finished": 0, "stopped": 1, "failed": 0, "unknown": 0},
        "request_ids": ["req-1-other-2.0"],
        "count": 1,
        "turn_effective": 5,
        "pending_on": [],
        "ranks": [{**rank, **times}],
    }
    client = connect(redis_url)
    await client.xadd(names.receipts_stream(service), {"receipt": json.dumps(receipt)})
    await client.aclose()
    path = "/v1/stops/stop-elsewhere"
    await stack.until(lambda: "stop-elsewhere" in stack.gateway.stops._records)
    for headers in (ACME, ADMIN):
        shown = (await stack.client.get(path, headers=headers)).json()
        assert (shown["trace_id"], shown["status"]) == (trace_id, "reclaimed")
        assert (shown["request_ids"], shown["accepted_at"]) == (["req-1-other-2"], None)
        assert shown["groups"][0]["ranks"][0]["reclaimed_at"] == 5.2
    assert (await stack.client.get(path, headers=BETA)).status_code == 404
    # Its phases are counted where it was accepted, and only there.
    assert stack.metric("stopway_stop_phase_seconds_count", phase="notify") == 0


async def test_publisher_numbers_each_stream(redis_url: str) -> None:
    health: list[bool] = []
    publisher = Publisher(redis_url, "p", SECRET, 900.0, health.append)
    stop = Stop("s", Target(everything=True), Reason.ADMIN, "default", True, time.time())
    _, going = publisher.publish(stop, "numbers-a", lambda: None)
    assert not going  # not connected yet: no number is used
    publisher.start()
    async with asyncio.timeout(SOON_S):
        while not publisher.healthy:
            await asyncio.sleep(0.005)
    numbers = [
        publisher.publish(stop, stream, lambda: None)[0]["sequence"]
        for stream in ("numbers-a", "numbers-a", "numbers-b")
    ]
    assert numbers == [1, 2, 1]
    client = connect(redis_url)

    async def written() -> bool:
        return (await client.xlen("numbers-a"), await client.xlen("numbers-b")) == (2, 1)

    await eventually(written)
    await client.aclose()
    await publisher.close()
    with pytest.raises(RedisError):
        await connect("redis://127.0.0.1:1/0").ping()
