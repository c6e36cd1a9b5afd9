"""Stops of what another gateway runs, at groups that this one hardly knows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stopway_core import names
from stopway_gateway.stop_bus import connect

from .conftest import ACME, ADMIN, SOON_S, Make, Stack, completion, write_groups
from .leader import Leader, Plan
from .test_redis import running, service_of


async def forget(two: Stack, groups: Path) -> None:
    """The groups leave the list: they drain, or their ranks form anew."""
    write_groups(groups, [])
    await two.until(lambda: two.gateway.registry.sessions() and not two.gateway.registry.ready())


@pytest.fixture
def pair(request: pytest.FixtureRequest, redis_url: str) -> dict[str, Any]:
    """Settings that two gateways share; nothing in these tests waits for a time to run out."""
    return {
        "redis_url": redis_url,
        "service_uid": service_of(request),
        "unknown_wait_s": SOON_S,
        "cut_wait_s": SOON_S,
    }


@pytest.mark.parametrize("path", ["requests/{uid}/cancel", "stops"])
async def test_a_group_that_left_the_list_is_stopped_at_the_other_gateway(
    make: Make, leader: Leader, pair: dict[str, Any], tmp_path: Path, path: str
) -> None:
    groups = tmp_path / "two.json"
    write_groups(groups, [leader])
    one = await make([leader], gateway_id="one", **pair)
    two = await make([leader], gateway_id="two", **{**pair, "groups_file": str(groups)})
    uid, task = await running(one, leader)
    await forget(two, groups)
    url = f"/v1/{path.format(uid=uid)}?wait=reclaimed"
    body = {"all": True, "wait": "reclaimed"} if path == "stops" else None
    reply = await two.client.post(url, json=body, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert (answer["status"], answer["request_ids"]) == ("reclaimed", [uid])
    (part,) = answer["groups"]
    assert (part["group"], len(part["ranks"])) == ("g0", 2)
    assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_group_that_left_the_list_is_told_its_mode(
    make: Make, leader: Leader, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.json"
    write_groups(groups, [leader])
    stack = await make([leader], groups_file=str(groups))
    await forget(stack, groups)
    reply = await stack.client.post("/v1/groups/pause", json={"mode": "wait"})
    assert (reply.status_code, reply.json()["pending_on"]) == (200, [])
    assert leader.modes == ["wait"]


async def test_a_gateway_passes_a_stop_on_to_groups_that_the_other_never_knew(
    make: Make, leader: Leader, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(pair["redis_url"])
    send = leader.send

    async def send_and_publish(message: dict[str, Any]) -> None:
        await send(message)
        if message["type"] == "receipt":  # as its front does
            receipt = {"receipt": json.dumps(message["receipt"])}
            await client.xadd(names.receipts_stream(pair["service_uid"]), receipt)

    monkeypatch.setattr(leader, "send", send_and_publish)
    one = await make([leader], gateway_id="one", **pair)
    two = await make([], gateway_id="two", **pair)
    requests = [await running(one, leader) for _ in range(2)]
    uids = [uid for uid, _ in requests]
    body = {"request_ids": uids, "wait": "reclaimed"}
    reply = await two.client.post("/v1/stops", json=body, headers=ACME)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["status"] == "reclaimed"
    # Once each, though a leader and a gateway tell of them.
    assert answer["outcome"] == {"finished": 0, "stopped": 2, "failed": 0}
    assert [part["group"] for part in answer["groups"]] == ["g0"]
    # Under the id that the other gateway gave it, and no second stop of the one that has them.
    assert list(leader.stops) == [answer["stop_id"]]
    for uid, task in requests:
        await task
        shown = (await one.client.get(f"/v1/requests/{uid}", headers=ACME)).json()
        assert (shown["status"], shown["stop_ids"]) == ("finished", [answer["stop_id"]])
    await client.aclose()


async def test_one_that_its_front_prepares_is_known_to_the_gateway_that_has_it(
    make: Make, leader: Leader, pair: dict[str, Any]
) -> None:
    """Its leader has not heard of it, and never will: its front refuses it for the stop."""
    leader.plan = Plan(prepares=True)
    one = await make([leader], gateway_id="one", **pair)
    two = await make([leader], gateway_id="two", **pair)
    task = asyncio.create_task(one.client.post("/v1/completions", json=completion(), headers=ACME))
    await leader.wait_for(lambda: leader.seen)
    (uid,) = leader.seen
    cancel = asyncio.create_task(
        two.client.post(f"/v1/requests/{uid}/cancel?wait=stopped", headers=ACME)
    )
    await leader.wait_for(lambda: leader.stops)
    (stop_id,) = leader.stops
    record = two.gateway.stops._records[stop_id]
    await two.until(lambda: record.parts["g0"].unknown and record.known)
    assert not record.resolved and not cancel.done()
    # Its front reads nothing but sessions: the gateway that has it passes the stop on.
    await leader.wait_for(lambda: leader.stop_ways.count((stop_id, "session")) == 1)
    refusal = {"status": 409, "message": "stopped", "code": "client_cancel", "param": None}
    await leader.send({"type": "refused", "uid": uid, **refusal})
    reply = await cancel
    assert reply.status_code == 200, reply.text
    assert (reply.json()["status"], reply.json()["outcome"]) == ("reclaimed", "stopped")
    assert [part["group"] for part in reply.json()["groups"]] == ["gateway:one"]
    assert (await task).json()["choices"][0]["stop_reason"] == "client_cancel"
    assert list(leader.stops) == [stop_id]
