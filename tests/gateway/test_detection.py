"""A group that emulates another engine learns of a client's leaving as late as that does."""

from __future__ import annotations

import asyncio

import pytest

from stopway_gateway import detection
from stopway_gateway.detection import delay_s

from .conftest import Make, completion
from .leader import Leader, Plan
from .test_disconnect import http_request, reset


@pytest.mark.parametrize(
    ("policy", "stream", "waited_s", "expected"),
    [
        ("native", True, 0.3, 0.0),
        ("vllm", False, 0.3, 0.0),
        ("llamacpp", True, 0.3, 0.0),
        ("deepinfer", True, 0.3, 0.0),
        ("sglang", True, 0.3, 2.0),
        ("sglang", False, 0.3, 0.0),
        ("tensorrt-llm", True, 0.25, 0.75),
        ("tensorrt-llm", False, 3.5, 0.5),
        ("", True, 0.3, 0.0),  # it never reached a group
    ],
)
def test_the_delay_of_each(policy: str, stream: bool, waited_s: float, expected: float) -> None:
    assert delay_s(policy, stream=stream, waited_s=waited_s) == expected


async def test_the_stop_comes_after_the_delay_and_not_before(
    make: Make, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "GRACE_S", 0.3)
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
