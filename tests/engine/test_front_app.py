"""The front's WebSocket: whose it is, and what comes on it."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from stopway_core.events import Mode
from stopway_engine.config import PodConfig
from stopway_engine.front.app import FrontApp
from stopway_engine.front.hub import Hub

from .front_ends import SECRET, FakeSession, submit

PATH = "/internal/v1/session?gateway=gw"


@pytest.fixture
def hub() -> Hub:
    return Hub(PodConfig(secret=SECRET), None, lambda receipt: None)


def test_a_session_needs_the_secret(hub: Hub) -> None:
    client = TestClient(FrontApp(hub).asgi())
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(PATH):
        pass


async def test_a_request_that_is_none_is_refused(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = FakeSession()
    message = submit("a")
    del message["epoch"]
    await FrontApp(hub)._submit(session, message)
    (refused,) = session.sent
    assert (refused["uid"], refused["status"], refused["code"]) == ("a", 500, "engine_error")
    assert "'epoch'" in capsys.readouterr().err


def test_a_mode_comes_from_a_gateway_and_nonsense_ends_its_session(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    client = TestClient(FrontApp(hub).asgi(), headers={"authorization": f"Bearer {SECRET}"})
    asked: list[tuple[Mode, float | None]] = []
    hub.mode.say = lambda mode, said_at: asked.append((mode, said_at))
    with client.websocket_connect(PATH) as session:
        assert session.receive_json()["mode"] == "running"
        session.send_json({"type": "mode", "mode": "wait"})
        session.send_json({"type": "mode", "mode": "drain", "said_at": 7.5})
        session.send_json({"type": "mode", "mode": "sleep"})
        session.send_json({"type": "mode", "mode": "keep"})  # nobody listens any more
    assert asked == [(Mode.WAITING, None), (Mode.DRAINING, 7.5)]
    assert "'sleep' is not a valid Mode" in capsys.readouterr().err
