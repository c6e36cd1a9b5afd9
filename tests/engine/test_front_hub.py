"""The front between a gateway's session and the leader rank: requests, modes, draft figures."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from stopway_core import names
from stopway_core.events import Mode
from stopway_engine.config import PodConfig
from stopway_engine.front.hub import Hub
from stopway_engine.grammar import spec

from .front_ends import SECRET, Codec, Engine, FakeSession, submit

# --- requests ---------------------------------------------------------------------------------


async def test_grammar_and_priority_reach_the_leader(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    await hub.submit(session, submit("a", grammar='{"regex":"a+"}', priority=-3))
    await hub.submit(session, submit("b", grammar="", priority=0))
    found = {body["uid"]: (body["grammar"], body["priority"]) for body in engine.submits}
    assert found == {"a": ('{"regex":"a+"}', -3), "b": ("", 0)}
    assert not session.of("refused")


async def test_the_services_deadlines_run_in_the_front_too(session: FakeSession) -> None:
    config = PodConfig(secret=SECRET, deadline_queue_s=5.0, deadline_total_s=60.0)
    hub = Hub(config, Codec(), lambda receipt: None)
    engine = Engine(hub)
    engine.connect(1)
    await hub.submit(session, submit("a", deadlines={"total": 9.0}))
    (body,) = engine.submits
    queue, first, total = body["deadlines"]
    assert 0 < queue <= 5.0 and first is None and 0 < total <= 9.0


async def test_a_group_that_drains_says_so(hub: Hub, session: FakeSession, engine: Engine) -> None:
    engine.say(draining=30.0)
    await hub.submit(session, submit("a"))
    (refused,) = session.of("refused")
    assert (refused["status"], refused["code"]) == (503, "drain") and not engine.submits


LOST = [(503, "rank_lost")]


@pytest.mark.parametrize("epoch", [0, 2])
async def test_a_request_of_another_epoch_is_refused(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was prepared")

    monkeypatch.setattr(Codec, "encode", never)
    await hub.submit(session, submit("a", epoch=epoch))
    assert [(r["status"], r["code"]) for r in session.of("refused")] == LOST and not engine.submits


@pytest.mark.parametrize("grammar", ["", '{"regex":"a"}'], ids=["tokenizing", "check"])
@pytest.mark.parametrize("epoch", [1, 2], ids=["the link broke", "another epoch"])
async def test_what_was_prepared_before_a_loss_is_refused_after_it(
    hub: Hub,
    session: FakeSession,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    grammar: str,
    epoch: int,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> list[int]:
        begun.set()
        go_on.wait(60)
        return [1]

    monkeypatch.setattr(*((spec, "check") if grammar else (Codec, "encode")), slow)
    task = asyncio.create_task(hub.submit(session, submit("a", grammar=grammar)))
    assert await asyncio.to_thread(begun.wait, 60)
    engine.leave()
    after = Engine(hub)
    after.connect(epoch)
    if grammar:
        await task  # although its check has not ended: nobody needs that
    go_on.set()
    await task
    assert [(r["status"], r["code"]) for r in session.of("refused")] == LOST
    assert not engine.submits and not after.submits


async def test_a_check_that_ended_with_its_epoch_leads_to_no_tokens(
    hub: Hub, session: FakeSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenized")

    async def check(*_: object) -> None:
        engine.leave()
        Engine(hub).connect(2)

    monkeypatch.setattr(Codec, "encode", never)
    monkeypatch.setattr(hub._preparation.checks, "check", check)
    await hub.submit(session, submit("a", grammar='{"regex":"a"}'))
    assert [(r["status"], r["code"]) for r in session.of("refused")] == LOST


@pytest.mark.parametrize("fields", [{}, {"epoch": "1"}, {"epoch": None}, {"epoch": True}])
async def test_a_request_without_an_epoch_is_none(
    hub: Hub, session: FakeSession, engine: Engine, fields: dict[str, Any]
) -> None:
    message = submit("a")
    del message["epoch"]
    with pytest.raises((KeyError, TypeError), match="epoch"):
        await hub.submit(session, {**message, **fields})
    assert not engine.submits


# --- links ------------------------------------------------------------------------------------


async def test_a_link_that_was_replaced_says_nothing_any_more(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    await hub.submit(session, submit("a"))
    engine.say(accepted=[["a", [1]]])
    after = Engine(hub)
    after.connect(2)  # before the end of the first link was read
    assert [(end["uid"], end["reason"]) for end in session.of("end")] == [("a", "rank_lost")]
    kinds = [m["type"] for m in session.sent if m["type"] in ("epoch", "hello")]
    assert kinds == ["hello", "hello", "epoch", "hello"]
    await hub.submit(session, submit("b", epoch=2))
    session.sent.clear()
    engine.say(accepted=[["b", [1]]], mode="keep", draining=9.0)
    engine.leave()
    assert not session.sent and hub.epoch == 2
    after.say(accepted=[["b", [1]]])
    assert [m["uid"] for m in session.of("accepted")] == ["b"]
    after.leave()
    assert hub.epoch is None


# --- modes ------------------------------------------------------------------------------------


def test_a_mode_is_so_when_the_leader_says_so(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    session.sent.clear()
    hub.mode.say(Mode.WAITING)
    assert engine.modes == ["wait"] and hub.hello()["mode"] == "running"
    engine.say(mode="wait")
    assert [(m["mode"], m["wanted"]) for m in session.of("mode")] == [
        ("running", "wait"),
        ("wait", "wait"),
    ]
    other = FakeSession("gw2", "gw2/1")
    hub.open(other)
    assert other.of("hello")[0]["mode"] == "wait"


def test_a_lost_rank_does_not_resume_a_paused_group(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    hub.mode.say(Mode.FROZEN)
    engine.say(mode="keep")
    engine.leave()
    session.sent.clear()
    engine.connect(2)  # a leader that knows of nothing, and says that it runs
    assert engine.told[0] == {"mode": "keep"}  # before any request can be
    assert session.of("hello")[0]["mode"] == "keep" and not session.of("mode")
    engine.say(mode="keep")
    assert [m["mode"] for m in session.of("mode")] == ["keep"]
    assert hub.hello()["mode"] == "keep"
    hub.mode.say(Mode.RUNNING)
    engine.say(mode="running")
    engine.leave()
    engine.connect(3)
    assert engine.modes == ["running"]


def test_a_mode_asked_for_between_two_epochs_is_for_the_next(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    engine.leave()
    hub.mode.say(Mode.DRAINING)
    assert hub.hello()["mode"] == "running"  # nobody has said otherwise
    engine.connect(2)
    assert engine.modes == ["drain"]


def test_a_hello_has_the_mode_of_the_leader_that_it_is_about(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    hub.mode.say(Mode.DRAINING)
    engine.say(mode="drain")
    engine.leave()
    hub.mode.say(Mode.RUNNING)  # between two epochs
    session.sent.clear()
    engine.connect(2)
    assert [(m["mode"], m["wanted"]) for m in session.of("hello")] == [("running", "running")]


def test_a_new_front_takes_over_the_mode_of_its_leader(hub: Hub, session: FakeSession) -> None:
    engine = Engine(hub)
    engine.connect(5, mode="wait")
    assert session.of("hello")[-1]["mode"] == "wait" and hub.hello()["wanted"] == "wait"
    engine.leave()
    engine.connect(6)
    assert engine.modes == ["wait"]


# --- figures ----------------------------------------------------------------------------------


async def test_draft_figures_come_with_the_end_and_with_the_load(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    await hub.submit(session, submit("a"))
    engine.say(accepted=[["a", [1]]])
    end = {
        "key": 1,
        "outcome": "finished",
        "reason": "grammar_end",
        "prompt_tokens": 2,
        "keep": 3,
        "cached_tokens": 0,
        "discarded_tokens": 1,
        "drafted_tokens": 6,
        "accepted_tokens": 4,
        "message": "",
    }
    engine.say(ended=[end], load=dict(zip(names.LOAD, (1, 2, 3, 4, 5, 6, 4), strict=True)))
    (ended,) = session.of("end")
    assert (ended["drafted_tokens"], ended["accepted_tokens"]) == (6, 4)
    assert (ended["finish_reason"], ended["reason"]) == ("stop", "grammar_end")
    (load,) = session.of("load")
    assert (load["cached"], load["drafted"], load["accepted"]) == (5, 6, 4)
    engine.leave()
    assert set(session.of("load")[-1].values()) == {"load", 0}


async def test_a_grammar_that_the_leader_cannot_compile_ends_with_its_words(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    await hub.submit(session, submit("a", grammar='{"json_object":true}'))
    engine.say(accepted=[["a", [1]]])
    end = dict.fromkeys(
        ("prompt_tokens", "keep", "cached_tokens", "discarded_tokens", "drafted_tokens"), 0
    )
    engine.say(
        ended=[
            {
                **end,
                "accepted_tokens": 0,
                "key": 1,
                "outcome": "failed",
                "reason": "bad_input",
                "message": "the grammar is too large",
            }
        ]
    )
    (ended,) = session.of("end")
    assert (ended["reason"], ended["message"]) == ("bad_input", "the grammar is too large")
