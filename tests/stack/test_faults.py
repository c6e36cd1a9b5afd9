"""Ranks, Redis, front and gateway are killed or frozen while requests run."""

import asyncio
import os
import signal
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


STACK = {"tensor": 1, "pipeline": 2, "ranks_per_pod": 1, "peer_loss_s": 3.0}


def children(api: Any, module: str) -> list[psutil.Process]:
    """The stack's processes that run ``module``, by pod."""
    found = []
    for name, pid in sorted(api.stack.pids.items()):
        tree = psutil.Process(pid)
        for process in [tree, *tree.children(recursive=True)]:
            if process.is_running() and module in process.cmdline() and name.startswith("stopway"):
                found.append(process)
    return found


async def epoch(api: Any) -> int:
    """The group's epoch; 0 while it has none."""
    ledgers = await api.ledgers()
    return int(ledgers[0].get("epoch") or 0) if ledgers else 0


async def epoch_after(api: Any, eventually: Any, before: int) -> int:
    """The first epoch after ``before`` that is seen."""
    seen = 0

    async def there() -> bool:
        nonlocal seen
        seen = await epoch(api)
        return seen > before

    await eventually(there, 60.0, f"the group is in an epoch after {before}")
    return seen


async def begins(api: Any, eventually: Any) -> int:
    """The epoch that a test begins in."""
    return await epoch_after(api, eventually, 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_lost_rank_ends_its_requests_and_the_group_serves_again(
    api: Any, eventually: Any, rank: int, number: signal.Signals
) -> None:
    before = await begins(api, eventually)
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(3)
        os.kill(children(api, "stopway_engine.rank")[rank].pid, number)
        await asyncio.wait_for(stream.read(), 20)
    assert stream.error is not None and stream.error["code"] == "rank_lost", stream
    assert stream.done
    request = await api.get(f"/v1/requests/{stream.uid}")
    assert request["outcome"] == "failed" and request["reason"] == "rank_lost"

    async def serves() -> bool:
        try:
            return await epoch(api) > before and "Paris" in await api.text(
                [{"role": "user", "content": "What is the capital of France?"}]
            )
        except AssertionError:
            return False

    await eventually(serves, 60.0, "the group serves again")
    await api.assert_idle()


async def test_a_stop_of_an_epoch_that_ends_is_resolved(api: Any, eventually: Any) -> None:
    """Its rank is frozen, so nobody can confirm it, until the epoch's end does."""
    await begins(api, eventually)
    victim = children(api, "stopway_engine.rank")[1]
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        victim.suspend()
        receipt = await api.cancel(stream.uid, wait="reclaimed", timeout=1)
        assert receipt["status"] in ("accepted", "noticed", "stopped")
        assert receipt["pending_on"], receipt

    async def resolved() -> bool:
        found = await api.get(f"/v1/stops/{receipt['stop_id']}")
        return found["status"] == "reclaimed"

    await eventually(resolved, 60.0, "the stop is resolved by the end of its epoch")
    await eventually(lambda: ready(api), 60.0, "the group serves again")
    await api.assert_idle()


async def ready(api: Any) -> bool:
    response = await api.http.get("/readyz")
    return response.status_code == 200


async def test_redis_lost_delays_no_token_and_loses_no_stop(api: Any, eventually: Any) -> None:
    redis_pid = api.stack.pids["redis"]
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        psutil.Process(redis_pid).suspend()
        try:
            await asyncio.wait_for(stream.read(20), 60)
            receipt = await api.cancel(stream.uid, timeout=10)
            assert receipt["status"] == "reclaimed", receipt
            await asyncio.wait_for(stream.read(), 30)
            assert stream.finish_reason == "abort"
        finally:
            psutil.Process(redis_pid).resume()
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        os.kill(redis_pid, signal.SIGKILL)
        receipt = await api.cancel(stream.uid, timeout=10)
        assert receipt["status"] == "reclaimed", receipt
    restarted = api.stack.restarts

    async def back() -> bool:
        return api.stack.pids.get("redis", redis_pid) != redis_pid

    await eventually(back, 30.0, f"Redis is restarted ({restarted})")
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        assert (await api.cancel(stream.uid))["status"] == "reclaimed"
    await api.assert_idle()


def pods(api: Any) -> list[int]:
    """The pids of the pods' supervise processes, the leader's first."""
    return [pid for name, pid in sorted(api.stack.pids.items()) if name.startswith("stopway")]


@pytest.mark.parametrize("pod", [0, 1])
async def test_a_pod_that_is_told_to_end_drains_and_proves_its_stops(
    api: Any, eventually: Any, pod: int
) -> None:
    before = await begins(api, eventually)
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        os.kill(pods(api)[pod], signal.SIGTERM)
        await asyncio.wait_for(stream.read(), 30)
    assert (stream.finish_reason, stream.stop_reason, stream.done) == ("abort", "drain", True)
    (stop_id,) = (await api.get(f"/v1/requests/{stream.uid}"))["stop_ids"]

    async def proved() -> bool:
        return bool((await api.get(f"/v1/stops/{stop_id}"))["status"] == "reclaimed")

    await eventually(proved, 30.0, "what was in flight came back on every rank")
    # By the ranks themselves: the end of their epoch would be known by the next one only, whose
    # number is when it began.
    began = await epoch_after(api, eventually, before) / 1000
    await eventually(lambda: ready(api), 60.0, "the group serves again")
    (group,) = (await api.get(f"/v1/stops/{stop_id}"))["groups"]
    assert all(rank["reclaimed_at"] < began for rank in group["ranks"]), group
    await api.assert_idle()


async def test_a_leader_that_drains_already_is_told_again_and_not_killed(
    api: Any, eventually: Any
) -> None:
    """As when a group's pods are all ended: the follower's is first, and its word goes ahead."""
    before = await begins(api, eventually)
    leader, follower = pods(api)
    port = psutil.Process(leader).environ()["STOPWAY_HEALTH_PORT"]
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        os.kill(follower, signal.SIGTERM)

        async def drains() -> bool:
            async with httpx.AsyncClient(trust_env=False) as client:
                status = (await client.get(f"http://127.0.0.1:{port}/readyz")).json()
            return any(rank["state"] == "draining" for rank in status["ranks"].values())

        await eventually(drains, 30.0, "the leader's pod knows that it drains")
        os.kill(leader, signal.SIGTERM)
        await asyncio.wait_for(stream.read(), 30)
    assert (stream.finish_reason, stream.stop_reason, stream.done) == ("abort", "drain", True)
    await epoch_after(api, eventually, before)
    await eventually(lambda: ready(api), 60.0, "the group serves again")
    await api.assert_idle()


async def test_a_paused_group_is_paused_when_its_pods_are_new(api: Any, eventually: Any) -> None:
    before = await begins(api, eventually)
    reply = await api.http.post("/v1/groups/pause", json={"mode": "wait"})
    assert reply.status_code == 200, reply.text
    for pid in pods(api):
        os.kill(pid, signal.SIGKILL)
    await epoch_after(api, eventually, before)

    async def paused() -> bool:
        (group,) = (await api.get("/v1/groups"))["groups"]
        return bool(group["mode"] == "wait")

    await eventually(paused, 30.0, "it is told of its mode")
    asked = asyncio.create_task(api.text([{"role": "user", "content": "Say hello."}]))

    async def waits() -> bool:
        (group,) = (await api.get("/v1/groups"))["groups"]
        return bool(group["waiting"] == 1)

    await eventually(waits, 30.0, "a request waits there")
    assert (await api.http.post("/v1/groups/resume", json={})).status_code == 200
    assert await asyncio.wait_for(asked, 60)
    await api.assert_idle()


async def test_a_killed_front_leaks_nothing(api: Any, eventually: Any) -> None:
    before = await begins(api, eventually)
    (front,) = children(api, "stopway_engine.front")
    async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(2)
        front.kill()
        await asyncio.wait_for(stream.read(), 20)
    assert stream.error is not None and stream.done
    await eventually(lambda: ready(api), 60.0, "a new front serves")
    await api.assert_idle()
    assert await begins(api, eventually) == before, "the ranks went on in their epoch"


async def test_a_killed_gateway_leaks_nothing(api: Any, eventually: Any) -> None:
    with pytest.raises(httpx.TransportError):
        async with api.stream(max_tokens=4000, ignore_eos=True) as stream:
            await stream.read(2)
            os.kill(api.stack.pids["gateway"], signal.SIGKILL)
            await asyncio.wait_for(stream.read(), 20)

    async def back() -> bool:
        try:
            return await ready(api)
        except httpx.TransportError:
            return False

    await eventually(back, 60.0, "a new gateway serves")
    await api.assert_idle()
