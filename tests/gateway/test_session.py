"""A session by itself, fed with what its leader says: whom it ends, and whether it is chosen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from stopway_core.events import Mode
from stopway_core.types import Reason
from stopway_gateway.config import Settings
from stopway_gateway.generation import parse_completion
from stopway_gateway.placement import Placement
from stopway_gateway.request import Request, Trace
from stopway_gateway.session import LeaderSession, Listener
from stopway_gateway.words import AdminWords

from .conftest import SOON_S, completion

Hear = Callable[..., None]


def session_of(words: AdminWords | None = None, grace_s: float = 1.0) -> LeaderSession:
    def nothing(*_: Any) -> None:
        pass

    return LeaderSession(
        "http://leader",
        "",
        gateway="gw",
        secret="s",
        epoch_grace_s=grace_s,
        words=words or AdminWords(),
        listener=Listener(nothing, nothing, nothing, nothing, nothing, nothing),
    )


def hello(
    session: LeaderSession,
    group: str = "g0",
    epoch: int = 7,
    mode: str = "running",
    wanted: str | None = None,
    said_at: float = 0.0,
) -> None:
    fields = {"mode": mode, "wanted": wanted, "said_at": said_at}
    hear(session, {"type": "hello", "group": group, "epoch": epoch, "policy": "native", **fields})


def hear(session: LeaderSession, message: dict[str, Any]) -> None:
    session._receive(json.dumps(message))


def mode(session: LeaderSession, mode: str, wanted: str, said_at: float) -> None:
    hear(session, {"type": "mode", "mode": mode, "wanted": wanted, "said_at": said_at})


def sent(session: LeaderSession) -> list[dict[str, Any]]:
    """What it has for its front, taken."""
    found = []
    while not session._outbox.empty():
        found.append(json.loads(session._outbox.get_nowait()))
    return found


def submitted(session: LeaderSession, uid: str) -> tuple[Request, asyncio.Event]:
    """A request on it, and the event of its end."""
    generation = parse_completion(completion(), Settings())
    request = Request(uid, "t", generation, Trace("", ""), "", 100)
    ended = asyncio.Event()
    request.on_settled = lambda _: ended.set()
    session.submit(request, {"type": "submit", "uid": uid})
    return request, ended


async def ends(ended: asyncio.Event) -> None:
    async with asyncio.timeout(SOON_S):
        await ended.wait()


def chosen(*sessions: LeaderSession) -> str | None:
    session = Placement().choose(sessions, "t", "")
    return None if session is None else session.group


async def test_a_submission_names_the_epoch_that_it_is_for() -> None:
    session = session_of()
    hello(session, epoch=7)
    submitted(session, "a")
    hear(session, {"type": "epoch", "epoch": 8})
    submitted(session, "b")
    assert [(m["uid"], m["epoch"]) for m in sent(session)] == [("a", 7), ("b", 8)]


# --- what an admin wants ------------------------------------------------------------------------


async def test_a_new_pod_of_a_paused_group_is_passed_over_from_its_hello_on() -> None:
    """It has been sent a reminder, and says that it runs until it has heard that."""
    words = AdminWords()
    paused, busy = session_of(words), session_of(words)
    hello(paused, "g0", mode="wait", wanted="wait", said_at=100.0)
    hello(busy, "g1", said_at=0.0)
    busy.outstanding = 500
    new = session_of(words)
    hello(new, "g0")
    assert [message["mode"] for message in sent(new)] == ["wait"]
    assert (new.mode, new.wanted) == (Mode.RUNNING, Mode.WAITING)
    assert chosen(new, busy) == "g1"
    assert chosen(new) == "g0"  # nobody else serves: it waits there


async def test_a_group_is_as_its_admin_has_just_said() -> None:
    group, busy = session_of(), session_of()
    hello(group, "g0")
    hello(busy, "g1")
    busy.outstanding = 500
    assert chosen(group, busy) == "g0"
    group.send_mode(Mode.FROZEN)
    assert chosen(group, busy) == "g1"
    group.send_mode(Mode.DRAINING)
    assert chosen(group) is None
    mode(group, "drain", "drain", 5.0)
    group.send_mode(Mode.RUNNING)
    assert chosen(group) is None  # it refuses until its leader has heard
    mode(group, "running", "running", 6.0)
    assert chosen(group, busy) == "g0"


async def test_what_its_front_said_before_it_had_the_word_takes_nothing_back() -> None:
    session = session_of()
    hello(session, wanted="running", said_at=5.0)
    session.send_mode(Mode.DRAINING)
    mode(session, "running", "running", 5.0)  # an answer to an earlier word
    assert chosen(session) is None
    mode(session, "running", "running", 7.0)  # another admin's, later
    assert chosen(session) == "g0"


# --- epochs that end ----------------------------------------------------------------------------


async def test_an_epoch_that_comes_back_keeps_what_it_was_given_since() -> None:
    session = session_of(grace_s=0.02)
    hello(session)
    before, ended = submitted(session, "before")
    hear(session, {"type": "epoch", "epoch": None})
    hello(session)
    since, _ = submitted(session, "since")
    await ends(ended)
    assert (before.reason, since.outcome) == (Reason.RANK_LOST, None)


async def test_one_that_met_the_leader_on_its_new_link_goes_on() -> None:
    """It was under way when the link broke, and came to the same epoch as the link was back."""
    session = session_of(grace_s=0.02)
    hello(session)
    taken, _ = submitted(session, "taken")
    _, ended = submitted(session, "lost")
    hear(session, {"type": "epoch", "epoch": None})
    hello(session)
    hear(session, {"type": "accepted", "uid": "taken", "prompt_tokens": 3})
    await ends(ended)
    assert taken.outcome is None


async def test_one_that_is_no_longer_superseded_keeps_its_requests() -> None:
    session, other = session_of(grace_s=0.02), session_of(grace_s=0.02)
    hello(session)
    hello(other)
    request, _ = submitted(session, "kept")
    _, ended = submitted(other, "ended")
    session.supersede(True)
    session.supersede(False)
    other.supersede(True)
    await ends(ended)  # the same time has passed for both
    assert request.outcome is None
