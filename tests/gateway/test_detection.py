"""A group that emulates another engine learns of a client's leaving as late as that does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stopway_core import policy
from stopway_gateway import detection
from stopway_gateway.detection import delay_s

from .conftest import Make, completion
from .leader import Leader, Plan
from .test_disconnect import http_request, reset


@pytest.mark.parametrize(
    ("name", "stream", "waited_s", "expected"),
    [
        ("native", True, 0.3, 0.0),
        ("vllm", False, 0.3, 0.0),
        ("llamacpp", True, 0.3, 0.0),
        ("llamacpp", False, 0.25, 0.75),
        ("deepinfer", True, 0.3, 0.0),
        ("sglang", True, 0.3, 2.0),
        ("sglang", False, 0.5, 3.5),
        ("tensorrt-llm", True, 0.25, 0.75),
        ("tensorrt-llm", False, 3.5, 0.5),
        ("", True, 0.3, 0.0),  # it never reached a group
    ],
)
def test_the_delay_of_each(name: str, stream: bool, waited_s: float, expected: float) -> None:
    assert delay_s(name, stream=stream, waited_s=waited_s) == expected


async def test_the_stop_comes_after_the_delay_and_not_before(
    make: Make, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "GRACE_S", 0.3)
    leader.policy = "sglang"
    leader.plan = Plan(chunks=None, pace_s=0.005)
    stack = await make([leader])
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(http_request("/v1/completions", completion(stream=True)))
    await stack.until(lambda: any(r.first_text_at for r in stack.gateway.table.live()))
    loop = asyncio.get_running_loop()
    (request,) = stack.gateway.table.live()
    reset(writer)
    left = loop.time()
    await stack.until(lambda: request.outcome is not None)
    assert loop.time() - left >= 0.3
    assert request.reason == "client_disconnect"


async def test_nothing_waits_for_one_that_has_ended(
    make: Make, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def delay(name: str, **_: object) -> float:
        asked.append(name)
        return 60.0

    monkeypatch.setattr(detection, "delay_s", delay)
    stack = await make([leader])
    for stream in (False, True):
        reply = await stack.client.post("/v1/completions", json=completion(stream=stream))
        assert reply.status_code == 200
    await stack.quiet()
    assert not asked


@pytest.mark.parametrize(
    "limits", [{"slow_reader_s": 0.2, "slow_reader_bytes_max": 1 << 30}, {"slow_reader_s": 60}]
)
async def test_one_that_does_not_read_is_let_go_at_once(
    make: Make, leader: Leader, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    """That is the gateway's own verdict: no policy is asked when it would have noticed."""
    monkeypatch.setattr(policy, "GRACE_S", 60.0)
    leader.policy = "sglang"
    leader.plan = Plan(chunks=["x" * (1 << 20)] * 1000, pace_s=0.002)
    stack = await make([leader], **limits)
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=1024)
    writer.write(http_request("/v1/completions", completion(stream=True)))
    await leader.wait_for(lambda: leader.running)
    (request,) = await stack.until(lambda: list(stack.gateway.table.live()))
    await stack.until(lambda: request.outcome is not None)
    assert request.reason == "client_disconnect" and not leader.running
    writer.close()
