"""The front between a gateway's session and the leader rank: grammars, modes, draft figures."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from stopway_core import names
from stopway_core.events import Mode
from stopway_core.signing import sign
from stopway_core.types import Reason, Stop, Target
from stopway_core.wire import Decoder, Frame, FrameKind
from stopway_engine.config import PodConfig
from stopway_engine.front.checks import CHECKERS, WAITING_MAX
from stopway_engine.front.hub import Hub
from stopway_engine.grammar import spec
from stopway_engine.tokenizer import Detokenizer


class Codec:
    """One token for each byte."""

    context = 1000
    vocab_size = 256
    piece_bytes_max = 1

    def encode(self, text: str, special: bool = False, bos: bool = False) -> list[int]:
        return list(text.encode())

    def detokenizer(self) -> Detokenizer:
        return Detokenizer([bytes([value]) for value in range(256)])


@dataclass
class FakeSession:
    gateway: str = "gw"
    lease: str = "gw/1"
    lost: bool = False
    sent: list[dict[str, Any]] = field(default_factory=list)

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def close(self) -> None: ...

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["type"] == kind]


class Engine:
    """The leader rank's end: what it was told, and what it says."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._decoder = Decoder()
        self.told: list[Any] = []

    def take(self, data: bytes) -> None:
        self.told += [frame.body for frame in self._decoder.feed(data)]

    def connect(self, epoch: int, mode: str = "running") -> None:
        self.told.clear()
        hello = {"epoch": epoch, "max_model_len": 100, "total_blocks": 9, "draining": False}
        self._hub.engine_connected(hello, self.take)
        self.say(hello=hello, mode=mode)

    def say(self, **body: Any) -> None:
        self._hub.engine_frame(Frame(FrameKind.FRONT_OUT, 1, 1, body, []))

    @property
    def submits(self) -> list[dict[str, Any]]:
        return [body["submit"] for body in self.told if "submit" in body]

    @property
    def modes(self) -> list[str]:
        return [body["mode"] for body in self.told if "mode" in body]


def submit(uid: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "submit",
        "uid": uid,
        "attempt": 1,
        "tenant": "t",
        "n": 1,
        "prompt": {"text": "hi"},
        "params": {"max_tokens": 5},
        "minted_at": time.time(),
        **fields,
    }


@pytest.fixture
def hub() -> Hub:
    config = PodConfig(secret="0123456789abcdef")
    return Hub(config, Codec(), lambda receipt: None)


@pytest.fixture
def session(hub: Hub) -> FakeSession:
    session = FakeSession()
    hub.open(session)
    return session


@pytest.fixture
def engine(hub: Hub, session: FakeSession) -> Engine:
    engine = Engine(hub)
    engine.connect(1)
    return engine


# --- grammars and priorities ------------------------------------------------------------------


async def test_grammar_and_priority_reach_the_leader(
    hub: Hub, session: FakeSession, engine: Engine
) -> None:
    await hub.submit(session, submit("a", grammar='{"regex":"a+"}', priority=-3))
    await hub.submit(session, submit("b", grammar="", priority=0))
    found = {body["uid"]: (body["grammar"], body["priority"]) for body in engine.submits}
    assert found == {"a": ('{"regex":"a+"}', -3), "b": ("", 0)}
    assert not session.of("refused")


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
    hub.stop(stop, sign(stop, "0123456789abcdef"))


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
    assert {message["uid"] for message in session.of("refused")} == set(uids)


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


async def test_the_services_deadlines_run_in_the_front_too(session: FakeSession) -> None:
    config = PodConfig(secret="0123456789abcdef", deadline_queue_s=5.0, deadline_total_s=60.0)
    hub = Hub(config, Codec(), lambda receipt: None)
    engine = Engine(hub)
    engine.connect(1)
    await hub.submit(session, submit("a", deadlines={"total": 9.0}))
    (body,) = engine.submits
    queue, first, total = body["deadlines"]
    assert 0 < queue <= 5.0 and first is None and 0 < total <= 9.0


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
