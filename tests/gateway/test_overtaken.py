"""A stop and its request that pass each other on their ways to the leader: nothing runs on."""

from __future__ import annotations

import asyncio

import pytest

from stopway_core import names
from stopway_core.types import Target
from stopway_gateway.stop_bus import connect

from .conftest import ADMIN, Make, completion
from .leader import Leader, Plan
from .test_redis import entry, running, service_of


async def test_a_foreign_stop_that_the_leader_no_longer_has_stops_what_it_cut(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    """It passed the leader before the request came, and its gateway after."""
    service = service_of(request)
    stack = await make([leader], redis_url=redis_url, service_uid=service)
    uid, task = await running(stack, leader)
    client = connect(redis_url)
    await client.xadd(names.gateway_stops_stream(service), entry(1, Target(everything=True)))
    await client.aclose()
    assert (await task).json()["choices"][0]["stop_reason"] == "admin"
    await leader.wait_for(lambda: uid not in leader.running)


async def test_a_selector_that_overtakes_its_request(
    make: Make,
    leader: Leader,
    redis_url: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader takes the selector while its front still tokenizes: it matches nothing there."""
    stack = await make([leader], redis_url=redis_url, service_uid=service_of(request))
    leader.plan.chunks = None
    matches = leader._matches
    monkeypatch.setattr(
        leader, "_matches", lambda signed, job: "uids" in signed["target"] and matches(signed, job)
    )
    uid, task = await running(stack, leader)
    await stack.client.post("/v1/stops", json={"all": True}, headers=ADMIN)
    assert (await task).json()["choices"][0]["stop_reason"] == "admin"
    await leader.wait_for(lambda: uid not in leader.running)


async def test_an_old_selector_means_nobody_who_came_after_it(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    service = service_of(request)
    stack = await make([leader], redis_url=redis_url, service_uid=service)
    kept, going = await running(stack, leader)
    named, ending = await running(stack, leader)
    client = connect(redis_url)
    stream = names.gateway_stops_stream(service)
    await client.xadd(stream, entry(1, Target(everything=True), age_s=600.0))
    await client.xadd(stream, entry(2, Target(uids=(named,))))
    await ending  # the second one was read, so the first one was
    assert kept in leader.running and not going.done()
    await stack.client.post(f"/v1/requests/{kept}/cancel", headers=ADMIN)
    await going
    await client.aclose()


async def test_one_that_its_front_still_prepares_is_stopped_past_redis(
    make: Make, leader: Leader, redis_url: str, request: pytest.FixtureRequest
) -> None:
    """The front, which checks its grammar for seconds, reads sessions and not Redis."""
    leader.plan = Plan(prepares=True)
    # Nothing is sent again in this test.
    settings = {"service_uid": service_of(request), "resend_after_s": 60.0, "resend_max_s": 60.0}
    stack = await make([leader], redis_url=redis_url, **settings)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: leader.seen)
    cancelled = await stack.client.post(f"/v1/requests/{leader.seen[0]}/cancel")
    stop_id = cancelled.json()["stop_id"]
    await leader.wait_for(lambda: (stop_id, "session") in leader.stop_ways)
    assert (await task).json()["choices"][0]["stop_reason"] == "client_cancel"
