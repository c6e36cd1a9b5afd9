"""The front between a gateway's session and the leader rank: requests, modes, draft figures."""

from __future__ import annotations

from stopway_core import names
from stopway_core.events import Mode
from stopway_engine.config import PodConfig
from stopway_engine.front.hub import Hub

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
    hub.engine_lost()
    session.sent.clear()
    engine.connect(2)  # a leader that knows of nothing, and says that it runs
    assert engine.told[0] == {"mode": "keep"}  # before any request can be
    assert session.of("hello")[0]["mode"] == "keep" and not session.of("mode")
    engine.say(mode="keep")
    assert [m["mode"] for m in session.of("mode")] == ["keep"]
    assert hub.hello()["mode"] == "keep"
    hub.mode.say(Mode.RUNNING)
    engine.say(mode="running")
    hub.engine_lost()
    engine.connect(3)
    assert engine.modes == ["running"]


def test_a_mode_asked_for_between_two_epochs_is_for_the_next(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    hub.engine_lost()
    hub.mode.say(Mode.DRAINING)
    assert hub.hello()["mode"] == "running"  # nobody has said otherwise
    engine.connect(2)
    assert engine.modes == ["drain"]


def test_a_new_front_takes_over_the_mode_of_its_leader(hub: Hub, session: FakeSession) -> None:
    engine = Engine(hub)
    engine.connect(5, mode="wait")
    assert hub.hello()["mode"] == "wait" and session.of("mode")[-1]["mode"] == "wait"
    hub.engine_lost()
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
    hub.engine_lost()
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
