"""Groups that an admin pauses, drains and resumes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from stopway_core.events import Mode
from stopway_gateway.dispatch import ATTEMPTS_MAX

from .conftest import ACME, Make, MoreLeaders, Stack, completion
from .leader import DRAINS, Leader, Plan


async def groups_of(stack: Stack) -> dict[str, dict[str, Any]]:
    """What ``GET /v1/groups`` says, by group."""
    return {g["group"]: g for g in (await stack.client.get("/v1/groups")).json()["groups"]}


async def test_groups_are_for_admins(stack: Stack, leader: Leader) -> None:
    for name in ("pause", "resume", "drain"):
        reply = await stack.client.post(f"/v1/groups/{name}", json={"mode": "wait"}, headers=ACME)
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "forbidden"
    assert (await stack.client.get("/v1/groups", headers=ACME)).status_code == 403
    assert not leader.modes


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "mode"),
        ({"mode": "drain"}, 400, "mode"),
        ({"mode": "wait", "groups": []}, 400, "groups"),
        ({"mode": "wait", "groups": "g0"}, 400, "groups"),
        ({"mode": "wait", "groups": ["g0", "gX"]}, 404, "groups"),
        ({"mode": "wait", "timeout": 61}, 400, "timeout"),
        ({"mode": "wait", "timeout": -1}, 400, "timeout"),
    ],
)
async def test_bad_pauses_tell_nobody(
    stack: Stack, leader: Leader, body: dict[str, Any], status: int, param: str
) -> None:
    reply = await stack.client.post("/v1/groups/pause", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert not leader.modes


async def test_no_group_is_a_503(make: Make) -> None:
    stack = await make([])
    assert (await stack.client.post("/v1/groups/resume")).status_code == 503
    assert await groups_of(stack) == {}


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_pause_is_answered_when_the_leader_says_so(
    stack: Stack, leader: Leader, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    leader.answer_modes = False
    with caplog.at_level(logging.INFO, "stopway_gateway.audit"):
        task = asyncio.create_task(stack.client.post("/v1/groups/pause", json={"mode": mode}))
        await leader.wait_for(lambda: leader.modes == [mode])
    assert not task.done()
    assert (await groups_of(stack))["g0"]["mode"] == "running"
    await leader.say_mode("keep" if mode == "wait" else "wait")  # of somebody else
    await leader.say_mode(mode)
    reply = await task
    assert reply.status_code == 200, reply.text
    assert (reply.json()["mode"], reply.json()["pending_on"]) == (mode, [])
    assert [group["mode"] for group in reply.json()["groups"]] == [mode]
    (line,) = (r.getMessage() for r in caplog.records if r.name == "stopway_gateway.audit")
    assert "tenant default" in line and f"mode {mode} of groups g0" in line
    leader.answer_modes = True
    reply = await stack.client.post("/v1/groups/resume")
    assert reply.status_code == 200 and leader.modes == [mode, "running"]


async def test_the_wait_runs_out_with_who_is_missing(
    make: Make, leader: Leader, second: Leader
) -> None:
    stack = await make([leader, second])
    second.answer_modes = False
    alone = {"mode": "wait", "groups": ["g0"]}
    assert (await stack.client.post("/v1/groups/pause", json=alone)).status_code == 200
    body = {"mode": "wait", "timeout": 0.05}
    reply = await stack.client.post("/v1/groups/pause", json=body)
    assert reply.status_code == 202
    (missing,) = reply.json()["pending_on"]
    assert missing.startswith("g1: ")
    assert {g["group"]: g["mode"] for g in reply.json()["groups"]} == {
        "g0": "wait",
        "g1": "running",
    }
    # It goes on: the leader says so later.
    await second.say_mode("wait")
    await stack.until(lambda: all(s.mode is Mode.WAITING for s in stack.gateway.registry.ready()))


async def test_the_same_word_again_waits_for_its_own_answer(stack: Stack, leader: Leader) -> None:
    """To abort once more ends what has come since, and the figures are to show that."""
    abort = {"mode": "abort"}
    assert (await stack.client.post("/v1/groups/pause", json=abort)).status_code == 200
    await leader.send({"type": "load", "running": 0, "waiting": 3})
    session = stack.gateway.registry.of_group("g0")
    await stack.until(lambda: session.load.get("waiting") == 3)
    leader.answer_modes = False
    task = asyncio.create_task(stack.client.post("/v1/groups/pause", json=abort))
    await leader.wait_for(lambda: leader.modes == ["abort", "abort"])
    await leader.send({"type": "load", "running": 0, "waiting": 0})
    await leader.say_mode("abort")
    reply = await task
    assert (reply.status_code, reply.json()["groups"][0]["waiting"]) == (200, 0)
    late = await stack.client.post("/v1/groups/pause", json={**abort, "timeout": 0.05})
    assert (late.status_code, len(late.json()["pending_on"])) == (202, 1)


async def test_a_group_that_connects_again_is_told_again(stack: Stack, leader: Leader) -> None:
    leader.answer_modes = False
    task = asyncio.create_task(stack.client.post("/v1/groups/drain", json={}))
    await leader.wait_for(lambda: leader.modes == ["drain"])
    await leader.break_sessions()
    await leader.wait_for(lambda: leader.modes == ["drain", "drain"])
    await leader.say_mode("drain")
    assert (await task).status_code == 200


async def test_a_new_pod_is_reminded_before_it_gets_a_request(stack: Stack, leader: Leader) -> None:
    pause = {"mode": "keep", "groups": ["g0"]}
    assert (await stack.client.post("/v1/groups/pause", json=pause)).status_code == 200
    word = leader.word
    await leader.start_anew()
    await leader.wait_for(lambda: leader.reminders == [word])
    assert leader.mode == "keep" and leader.modes == [] and leader.word == word
    session = stack.gateway.registry.of_group("g0")
    await stack.until(lambda: session.connected and session.mode is Mode.FROZEN)


async def test_who_missed_a_resume_believes_it_and_reminds_of_nothing_old(
    stack: Stack, leader: Leader
) -> None:
    assert (await stack.client.post("/v1/groups/pause", json={"mode": "keep"})).status_code == 200
    leader.word = ("running", leader.word[1] + 1.0)  # by another gateway, while this one was away
    leader.mode = "running"
    await leader.break_sessions()
    session = stack.gateway.registry.of_group("g0")
    await stack.until(lambda: session.connected and session.mode is Mode.RUNNING)
    await leader.start_anew()
    await leader.wait_for(lambda: leader.reminders == [("running", 2.0)])


async def test_a_mode_is_known_from_the_hello(make: Make, leader: Leader) -> None:
    leader.mode = "keep"
    stack = await make([leader])
    await leader.send(
        {"type": "load", "running": 3, "waiting": 2, "free": 90, "held": 8, "cached": 2}
    )
    await stack.until(lambda: stack.gateway.registry.sessions()[0].load.get("running") == 3)
    assert (await groups_of(stack))["g0"] == {
        "group": "g0",
        "mode": "keep",
        "epoch": 7,
        "running": 3,
        "waiting": 2,
        "blocks": {"free": 90, "held": 8, "cached": 2},
    }
    assert (await stack.client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("name", ["pause", "drain"])
async def test_placement_avoids_a_group_that_does_not_serve(
    make: Make, leader: Leader, second: Leader, name: str
) -> None:
    """Even for a conversation that it has the cache of."""
    stack = await make([leader, second])
    talk = completion(metadata={"conversation_id": "c1"})
    await stack.client.post("/v1/completions", json=talk)
    home, other = (leader, second) if leader.seen else (second, leader)
    body = {"groups": [home.group], **({"mode": "wait"} if name == "pause" else {})}
    assert (await stack.client.post(f"/v1/groups/{name}", json=body)).status_code == 200
    assert other.modes == []
    for _ in range(3):
        assert (await stack.client.post("/v1/completions", json=talk)).status_code == 200
    assert (len(home.seen), len(other.seen)) == (1, 3)


async def test_requests_wait_at_a_paused_group_and_their_deadlines_run(
    make: Make, leader: Leader
) -> None:
    stack = await make([leader], dispatch_wait_s=0.05)
    await stack.client.post("/v1/groups/pause", json={"mode": "wait"})
    leader.plan = Plan(tokens=False)
    body = completion(deadlines={"queue": 5})
    task = asyncio.create_task(stack.client.post("/v1/completions", json=body))
    await leader.wait_for(lambda: leader.running)
    (uid,) = leader.running
    assert 0 < leader.jobs[uid].message["deadlines"]["queue"] <= 5
    await leader._end(leader.jobs[uid], "deadline_queue", "stopped")
    assert (await task).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_of_all_groups_refuses_until_they_resume(
    stack: Stack, leader: Leader, stream: bool
) -> None:
    leader.plan = Plan(chunks=["a"] * 3, pace_s=0.05)
    running = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: leader.running)
    reply = await stack.client.post("/v1/groups/drain", json={"groups": ["g0"]})
    assert reply.status_code == 200, reply.text
    body = completion(stream=stream)
    refused = await stack.client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "drain")
    assert refused.headers["retry-after"] == "1"
    assert (await running).json()["choices"][0]["finish_reason"] == "stop"
    assert (await stack.client.get("/readyz")).status_code == 200  # an admin must get in
    await stack.client.post("/v1/groups/resume", json={})
    assert (await stack.client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (503, "drain", "drain"),
        (503, "rank_lost", "rank_lost"),
        (503, "not_ready", "rank_lost"),
        (429, "queue_full", "bad_input"),
    ],
)
async def test_a_leaders_refusal_says_when_to_come_again(
    make: Make, leader: Leader, status: int, code: str, reason: str
) -> None:
    """As when it drains, and no other group takes it in time."""
    stack = await make([leader], dispatch_wait_s=0.05)
    leader.plan = Plan(refuse={"status": status, "message": "no", "code": code, "param": None})
    reply = await stack.client.post("/v1/completions", json=completion())
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.headers["retry-after"] == "1"
    shown = await stack.client.get(f"/v1/requests/{reply.headers['x-request-id']}")
    assert shown.json()["reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_group_that_begins_to_drain_refuses_another_takes(
    make: Make, leader: Leader, second: Leader, stream: bool
) -> None:
    stack = await make([leader, second])
    leader.plan = Plan(refuse=DRAINS)
    talk = completion(metadata={"conversation_id": "c"}, deadlines={"total": 9}, stream=stream)
    first = await stack.client.post("/v1/completions", json=talk)
    assert first.status_code == 200, first.text
    (uid,) = leader.seen
    assert second.seen == [uid]
    before, after = (each.jobs[uid].message for each in (leader, second))
    assert (before["attempt"], after["attempt"]) == (1, 2)
    assert after["minted_at"] >= before["minted_at"]
    assert after["deadlines"]["total"] <= before["deadlines"]["total"] <= 9
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert (shown["group"], shown["outcome"]) == ("g1", "finished")
    await stack.client.post("/v1/completions", json=talk)  # its home is there now
    assert (len(leader.seen), len(second.seen)) == (1, 2)
    assert {s.group: (len(s.live), s.outstanding) for s in stack.gateway.registry.sessions()} == {
        "g0": (0, 0),
        "g1": (0, 0),
    }


async def test_one_that_many_groups_refuse_is_refused(
    make: Make, more_leaders: MoreLeaders
) -> None:
    leaders = [await more_leaders(f"g{n}") for n in range(ATTEMPTS_MAX + 1)]
    stack = await make(leaders)
    for each in leaders:
        each.plan = Plan(refuse=DRAINS)
    reply = await stack.client.post("/v1/completions", json=completion())
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "drain")
    assert [len(each.seen) for each in leaders] == [1] * ATTEMPTS_MAX + [0]


async def test_one_that_was_stopped_goes_to_no_other_group(
    make: Make, leader: Leader, second: Leader
) -> None:
    stack = await make([leader, second])
    leader.plan = Plan(accept=False, end_on_stop=False)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: leader.seen)
    (uid,) = leader.seen
    await stack.client.post(f"/v1/requests/{uid}/cancel")
    await leader.send({"type": "refused", "uid": uid, **DRAINS})
    assert (await task).json()["choices"][0]["stop_reason"] == "client_cancel"
    assert not second.seen


@pytest.mark.parametrize(
    ("status", "reason", "outcome"),
    [(429, "deadline_queue", "stopped"), (504, "deadline_total", "stopped")],
)
async def test_a_deadline_that_ended_at_the_front_is_one(
    stack: Stack, leader: Leader, status: int, reason: str, outcome: str
) -> None:
    leader.plan = Plan(refuse={"status": status, "message": "late", "code": reason, "param": None})
    reply = await stack.client.post("/v1/completions", json=completion())
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, reason)
    uid = reply.headers["x-request-id"]
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert (shown["reason"], shown["outcome"]) == (reason, outcome)


async def test_abort_ends_what_runs(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(chunks=None, pace_s=0.005)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: leader.running)
    await stack.client.post("/v1/groups/pause", json={"mode": "abort"})
    choice = (await task).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "admin")
