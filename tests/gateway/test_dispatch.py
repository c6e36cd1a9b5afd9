"""Requests that a group refused with nothing delivered: who gets them next, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from stopway_gateway.placement import takes

from .conftest import SOON_S, Make, Stack, completion
from .leader import DRAINS, LOST, Leader, Plan


def ask(stack: Stack, **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(stack.client.post("/v1/completions", json=completion(**fields)))


@pytest.fixture
async def stack(make: Make, leader: Leader) -> Stack:
    """One whose requests have all the time that a slow machine needs."""
    return await make([leader], dispatch_wait_s=10 * SOON_S)


async def waits_again(stack: Stack, leader: Leader) -> None:
    """The only request was refused by ``leader``, and is with nobody."""
    await leader.wait_for(lambda: leader.seen)
    (request,) = stack.gateway.table.live()
    await stack.until(lambda: request.attempt == 2 and not request.dispatched)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_rank_is_waited_for(stack: Stack, leader: Leader, stream: bool) -> None:
    leader.plan = Plan(refuse=LOST)
    task = ask(stack, stream=stream, deadlines={"total": 60})
    await waits_again(stack, leader)
    (uid,) = leader.seen
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert (shown["status"], shown["group"], shown["epoch"]) == ("waiting", None, None)
    first = leader.jobs[uid].message
    await leader.say_mode("running")  # says nothing of its ranks
    leader.plan = Plan()
    await leader.say_hello(8)
    assert (await task).status_code == 200
    assert leader.seen == [uid, uid]
    again = leader.jobs[uid].message
    assert [(m["attempt"], m["epoch"]) for m in (first, again)] == [(1, 7), (2, 8)]
    assert again["minted_at"] >= first["minted_at"]
    assert again["deadlines"]["total"] <= first["deadlines"]["total"] <= 60


async def test_a_link_that_was_away_for_a_moment_is_waited_for(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(refuse=LOST)
    task = ask(stack)
    await waits_again(stack, leader)
    leader.plan = Plan()
    await leader.say_hello(7)
    assert (await task).status_code == 200


async def test_one_for_an_epoch_that_is_over_goes_to_the_next(stack: Stack, leader: Leader) -> None:
    """It passes the hello of the next one on its way."""
    leader.epoch = 8
    task = ask(stack)
    await leader.wait_for(lambda: leader.seen)
    await leader.say_hello(8)
    assert (await task).status_code == 200
    assert len(leader.seen) == 2


async def test_a_refusal_that_comes_after_the_next_hello_is_of_the_epoch_before(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(accept=False)
    task = ask(stack)
    await leader.wait_for(lambda: leader.running)
    (uid,) = leader.running
    leader.plan = Plan()
    await leader.say_hello(8)
    await leader.send({"type": "refused", "uid": uid, **LOST})
    assert (await task).status_code == 200
    assert leader.seen == [uid, uid]


@pytest.mark.parametrize("refusal", [LOST, DRAINS])
async def test_another_group_takes_it(
    make: Make, leader: Leader, second: Leader, refusal: dict[str, Any]
) -> None:
    stack = await make([leader, second])
    leader.plan = Plan(refuse=refusal)
    reply = await ask(stack)
    assert reply.status_code == 200, reply.text
    assert leader.seen == second.seen == [reply.headers["x-request-id"]]


async def test_one_that_drained_is_asked_again_when_it_was_resumed(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(refuse=DRAINS)
    task = ask(stack)
    await waits_again(stack, leader)
    leader.plan = Plan()
    await leader.say_mode("running")
    assert (await task).status_code == 200


async def test_one_that_drains_for_its_admin_is_not_waited_for(make: Make, leader: Leader) -> None:
    stack = await make([leader], dispatch_wait_s=1000.0)
    leader.plan = Plan(refuse=DRAINS)
    task = ask(stack)
    await waits_again(stack, leader)
    await leader.say_mode("drain")
    reply = await task
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "drain")
    assert len(leader.seen) == 1


async def test_while_one_drains_another_that_forms_anew_is_waited_for(
    make: Make, leader: Leader, second: Leader
) -> None:
    stack = await make([leader, second], dispatch_wait_s=10 * SOON_S)
    await leader.say_mode("drain")
    await stack.until(lambda: not all(map(takes, stack.gateway.registry.ready())))
    second.plan = Plan(refuse=LOST)
    task = ask(stack)
    await waits_again(stack, second)
    await second.send({"type": "epoch", "epoch": None})
    await stack.until(lambda: len(stack.gateway.registry.ready()) == 1)
    second.plan = Plan()
    await second.say_hello(8)
    assert (await task).status_code == 200
    assert not leader.seen and len(second.seen) == 2


async def test_its_own_deadline_runs_on(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(refuse=LOST)
    reply = await ask(stack, deadlines={"queue": 0.05})
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "deadline_queue")


async def test_one_that_no_group_takes_in_time_gets_its_refusal(make: Make, leader: Leader) -> None:
    stack = await make([leader], dispatch_wait_s=0.05)
    leader.plan = Plan(refuse=LOST)
    reply = await ask(stack)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["message"]) == (
        503,
        LOST["code"],
        LOST["message"],
    )


async def test_one_that_its_leader_has_after_all_was_lost(stack: Stack, leader: Leader) -> None:
    """The link to the leader broke behind it: the front can't know that it came through."""
    leader.plan = Plan(refuse=LOST)
    task = ask(stack)
    await waits_again(stack, leader)
    leader.plan = Plan(refuse={"status": 409, "message": "known", "code": "duplicate"})
    await leader.say_hello(7)
    reply = await task
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "rank_lost")


async def test_one_that_is_stopped_while_it_waits_goes_nowhere(
    stack: Stack, leader: Leader
) -> None:
    leader.plan = Plan(refuse=LOST)
    task = ask(stack)
    await waits_again(stack, leader)
    cancelled = await stack.client.post(f"/v1/requests/{leader.seen[0]}/cancel")
    assert (await task).json()["choices"][0]["stop_reason"] == "client_cancel"
    stop = await stack.client.get(f"/v1/stops/{cancelled.json()['stop_id']}")
    assert stop.json()["status"] == "reclaimed"
    await serves_another(stack, leader)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_whose_client_leaves_while_it_waits_goes_nowhere(
    stack: Stack, leader: Leader, stream: bool
) -> None:
    leader.plan = Plan(refuse=LOST)
    task = ask(stack, stream=stream)
    await waits_again(stack, leader)
    task.cancel()
    await stack.quiet()
    await serves_another(stack, leader)


async def serves_another(stack: Stack, leader: Leader) -> None:
    """The group is back, and takes what is new, and not what it refused before."""
    (before,) = leader.seen
    leader.plan = Plan()
    await leader.say_hello(8)
    session = stack.gateway.registry.of_group("g0")
    await stack.until(lambda: session.epoch == 8)
    reply = await ask(stack)
    assert reply.status_code == 200
    assert leader.seen == [before, reply.headers["x-request-id"]]
    assert not session.live and not session.outstanding
