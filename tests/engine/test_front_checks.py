"""Grammars are checked in the front before their requests go on; what ends a check before that."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from stopway_core.signing import sign
from stopway_core.types import Reason, Stop, Target
from stopway_engine.front.checks import CHECKERS, WAITING_MAX
from stopway_engine.front.hub import Hub
from stopway_engine.grammar import spec

from .front_ends import SECRET, Codec, Engine, FakeSession, submit


async def test_a_grammar_is_checked_aside_before_anything_is_tokenized(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def check(text: str) -> None:
        threads.append(threading.current_thread().name)
        raise spec.GrammarError(f"no such type in {text}")

    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was tokenized first")

    monkeypatch.setattr(spec, "check", check)
    monkeypatch.setattr(Codec, "encode", never)
    await hub.submit(session, submit("a", grammar='{"json_schema":{}}'))
    assert session.of("refused") == [
        {
            "type": "refused",
            "uid": "a",
            "status": 400,
            "message": 'no such type in {"json_schema":{}}',
            "code": "invalid_grammar",
            "param": "response_format",
        }
    ]
    assert not engine.submits
    assert threads[0].startswith("check-grammar")


async def test_a_grammar_that_takes_long_keeps_no_prompt_waiting(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(spec, "check", lambda _: go_on.wait(10))
    slow = [
        asyncio.create_task(hub.submit(session, submit(f"slow{n}", grammar='{"regex":"a"}')))
        for n in range(8)
    ]
    await asyncio.sleep(0)  # all of them are on their way
    await hub.submit(session, submit("quick"))
    assert [body["uid"] for body in engine.submits] == ["quick"]
    go_on.set()
    await asyncio.gather(*slow)
    assert len(engine.submits) == 9


async def test_a_grammar_of_no_sense_is_refused(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    await hub.submit(session, submit("a", grammar='{"regex":"("}'))
    (refused,) = session.of("refused")
    assert (refused["status"], refused["code"]) == (400, "invalid_grammar") and refused["message"]
    assert not engine.submits


def slow_checks(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Checks that wait for an event, and the grammars that were checked, in their order."""
    go_on, checked = threading.Event(), []

    def check(text: str) -> None:
        checked.append(text)
        go_on.wait(10)

    monkeypatch.setattr(spec, "check", check)
    return go_on, checked


def send_stop(
    hub: Hub,
    *uids: str,
    target: Target | None = None,
    tenant: str = "t",
    admin: bool = False,
    age_s: float = 0.0,
) -> None:
    aim, reason = target or Target(uids=uids), Reason.CLIENT_DISCONNECT
    stop = Stop(f"stop-{tenant}", aim, reason, tenant, admin, issued_at=time.time() - age_s)
    hub.stop(stop, sign(stop, SECRET))


async def test_one_tenants_grammars_do_not_make_anothers_wait(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun = threading.Semaphore(0), []

    def check(text: str) -> None:
        begun.append(text)
        may_end.acquire(timeout=60)

    monkeypatch.setattr(spec, "check", check)
    tasks = [
        asyncio.create_task(hub.submit(session, submit(f"a{n}", grammar=f"a{n}", tenant="a")))
        for n in range(20)
    ]
    await asyncio.sleep(0)
    last = hub.submit(session, submit("b", grammar="b", tenant="b"))
    tasks.append(asyncio.create_task(last))
    async with asyncio.timeout(30):
        for ended in range(3):  # one after the other, since threads run in no order
            while len(begun) < CHECKERS + ended:
                await asyncio.sleep(0.001)
            may_end.release()
    may_end.release(20)
    await asyncio.gather(*tasks)
    assert "b" in begun[: CHECKERS + 2] and len(engine.submits) == 21


@pytest.mark.parametrize("how", ["stop", "admin", "lost", "conversation", "tenant", "all"])
async def test_nobody_checks_the_grammar_of_one_who_has_left(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    go_on, checked = slow_checks(monkeypatch)
    uids = [f"a{n}" for n in range(20)]
    tasks = [
        asyncio.create_task(hub.submit(session, submit(uid, grammar=uid, conversation="c")))
        for uid in uids
    ]
    await asyncio.sleep(0)
    if how == "lost":
        hub.closed(session)
    elif how in ("stop", "admin"):
        by_admin = how == "admin"
        send_stop(hub, *uids, tenant="x" if by_admin else "t", admin=by_admin)
    else:
        selectors = {
            "conversation": Target(conversation="c"),
            "tenant": Target(tenant="t"),
            "all": Target(everything=True),
        }
        send_stop(hub, target=selectors[how])
    await asyncio.gather(*tasks)  # although no check has ended
    go_on.set()
    assert len(checked) <= CHECKERS and not engine.submits
    refused = session.of("refused")
    assert {message["uid"] for message in refused} == set(uids)
    assert {message["code"] for message in refused} == {"client_disconnect"}


@pytest.mark.parametrize(
    "stop",
    [
        {"tenant": "other"},
        {"tenant": "other", "target": Target(everything=True)},
        {"target": Target(conversation="another")},
        {"target": Target(everything=True), "age_s": 60.0},  # sent again: it was before this one
    ],
    ids=["a foreign tenant's", "all of a foreign tenant's", "another conversation", "an old one"],
)
async def test_a_stop_of_others_leaves_a_check_alone(
    hub: Hub,
    session: FakeSession,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    stop: dict[str, Any],
) -> None:
    go_on, _ = slow_checks(monkeypatch)
    task = asyncio.create_task(hub.submit(session, submit("a", grammar="a", conversation="c")))
    await asyncio.sleep(0)
    send_stop(hub, *([] if "target" in stop else ["a"]), **stop)
    go_on.set()
    await task
    assert [body["uid"] for body in engine.submits] == ["a"] and not session.of("refused")


async def test_deadlines_run_while_a_grammar_is_checked(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "check", lambda _: time.sleep(0.05))
    deadlines = {"queue": None, "first_token": 30.0, "total": 60.0}
    await hub.submit(session, submit("a", grammar="a", deadlines=deadlines))
    (body,) = engine.submits
    queue, first, total = body["deadlines"]
    assert queue is None and first <= 30.0 - 0.05 and total <= 60.0 - 0.05


@pytest.mark.parametrize(
    ("deadline", "status", "code"),
    [
        ("queue", 429, "deadline_queue"),
        ("first_token", 504, "deadline_ttft"),
        ("total", 504, "deadline_total"),
    ],
)
@pytest.mark.parametrize("where", ["line", "check", "tokenizing"])
async def test_a_deadline_ends_what_the_front_still_has(
    hub: Hub,
    session: FakeSession,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    deadline: str,
    status: int,
    code: str,
) -> None:
    go_on, checked = slow_checks(monkeypatch)
    before = CHECKERS if where == "line" else 0
    tasks = [
        asyncio.create_task(hub.submit(session, submit(f"b{n}", grammar="b")))
        for n in range(before)
    ]
    await asyncio.sleep(0)
    message = submit("a", grammar="a", deadlines={deadline: 0.02})
    if where == "tokenizing":
        monkeypatch.setattr(Codec, "encode", lambda *_, **__: go_on.wait(10) and [1])
        message["grammar"] = ""
    await hub.submit(session, message)  # although no check has ended
    (refused,) = session.of("refused")
    assert (refused["uid"], refused["status"], refused["code"]) == ("a", status, code)
    assert f"the {deadline} deadline" in refused["message"]
    go_on.set()
    await asyncio.gather(*tasks)
    assert {body["uid"] for body in engine.submits} == {f"b{n}" for n in range(before)}
    assert where == "check" or "a" not in checked


async def test_a_tenant_may_have_so_many_grammars_in_the_line(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, _ = slow_checks(monkeypatch)

    def start(uid: str, tenant: str = "t") -> asyncio.Task[None]:
        return asyncio.create_task(hub.submit(session, submit(uid, grammar=uid, tenant=tenant)))

    tasks = [start(f"a{n}") for n in range(CHECKERS + WAITING_MAX)]
    await asyncio.sleep(0)
    await start("late")
    (refused,) = session.of("refused")
    assert (refused["uid"], refused["status"], refused["code"]) == ("late", 429, "queue_full")
    tasks += [start("other", "other")]
    send_stop(hub, f"a{CHECKERS}")
    await tasks[CHECKERS]  # its place is free
    tasks += [start("again")]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*tasks)
    assert len(engine.submits) == CHECKERS + WAITING_MAX + 1
    assert {"other", "again"} <= {body["uid"] for body in engine.submits}


async def test_the_leader_is_not_sent_what_has_waited_too_long_here(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that the attempt is too old, and to look at the clocks."""
    go_on, _ = slow_checks(monkeypatch)
    minted_at = time.time() - hub.config.submit_age_s + 0.5
    await hub.submit(session, submit("a", grammar="a", minted_at=minted_at))
    go_on.set()
    (refused,) = session.of("refused")
    assert (refused["status"], refused["code"]) == (429, "queue_full")
    await hub.submit(session, submit("b", minted_at=minted_at - 1))
    assert [body["uid"] for body in engine.submits] == ["b"]  # it came too old: the leader says so


async def test_a_prompt_that_cannot_fit_costs_no_check(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checked = slow_checks(monkeypatch)
    await hub.submit(session, submit("a", grammar="a", prompt={"text": "x" * 101}))
    (refused,) = session.of("refused")
    assert refused["code"] == "context_length_exceeded" and not checked and not engine.submits


async def test_a_check_that_failed_may_be_tried_again(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: str) -> None:
        raise spec.CheckError("busy")

    monkeypatch.setattr(spec, "check", check)
    await hub.submit(session, submit("a", grammar="a"))
    (refused,) = session.of("refused")
    assert (refused["status"], refused["code"]) == (503, "grammar_check_failed")
    assert refused["message"] == "busy" and not engine.submits


async def test_a_group_that_drains_leaves_its_checks_to_others(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, _ = slow_checks(monkeypatch)
    uids = [f"a{n}" for n in range(CHECKERS + 2)]
    tasks = [asyncio.create_task(hub.submit(session, submit(uid, grammar=uid))) for uid in uids]
    await asyncio.sleep(0)
    engine.say(draining=30.0)
    await asyncio.gather(*tasks)  # although no check has ended
    go_on.set()
    refused = session.of("refused")
    assert {(r["uid"], r["status"], r["code"]) for r in refused} == {
        (uid, 503, "drain") for uid in uids
    }
    assert not engine.submits
