"""The client leaves: in every phase, on every route, and a thousand times."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import BODIES, Make, Stack, chat, completion
from .leader import Leader, Plan

PHASES = ("body", "waiting", "submitted", "accepted", "mid-stream")
LOOPS = 1000


def http_request(route: str, body: dict[str, Any], *, cut: int = 0) -> bytes:
    """The bytes of a POST, without the last ``cut`` of its body."""
    data = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin-key\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data[: len(data) - cut]


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST, as a killed client does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def arrive(stack: Stack, leader: Leader, phase: str) -> Callable[[], bool]:
    """Set the leader up so that a request stays in ``phase``; how to see that it is there."""
    if phase == "body":
        return lambda: stack.gateway.active == 1
    if phase == "waiting":
        leader.epoch = None
        await leader.send({"type": "epoch", "epoch": None})
        await stack.until(lambda: not stack.gateway.registry.ready())
        return lambda: len(stack.gateway.table) == 1
    if phase == "submitted":
        leader.plan = Plan(accept=False)
        return lambda: len(leader.running) == 1
    if phase == "accepted":
        leader.plan = Plan(tokens=False)
        return lambda: any(request.accepted for request in stack.gateway.table.live())
    leader.plan = Plan(chunks=None, pace_s=0.005)
    return lambda: any(request.first_text_at for request in stack.gateway.table.live())


@pytest.mark.parametrize("route", BODIES)
async def test_case_g06_disconnect_is_noticed_in_every_phase(
    make: Make, leader: Leader, route: str
) -> None:
    """The table of route by phase, with the whole stack of middlewares on."""
    stack = await make([leader])
    for stream in (False, True):
        for phase in PHASES:
            for how in ("reset", "close"):
                leader.jobs.clear()
                there = await arrive(stack, leader, phase)
                known = {r.uid for r in stack.gateway.table.visible(_Everything())}
                _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
                cut = 5 if phase == "body" else 0
                writer.write(http_request(route, BODIES[route](stream=stream), cut=cut))
                await stack.until(there)
                if how == "reset":
                    reset(writer)
                else:
                    writer.close()
                await stack.quiet()
                assert not leader.running, (route, stream, phase, how)
                new = [r for r in stack.gateway.table.visible(_Everything()) if r.uid not in known]
                assert len(new) == (phase != "body"), (route, stream, phase, how)
                for request in new:
                    await _check_receipt(stack, request.uid)
                if phase == "waiting":
                    leader.epoch = 7
                    await leader.send({"type": "epoch", "epoch": 7})
                    await stack.until(stack.gateway.registry.ready)
    assert len(leader.seen) == 3 * 2 * 2  # those that reached it, by phase, stream and how


class _Everything:
    def reaches(self, tenant: str) -> bool:
        return True


async def _check_receipt(stack: Stack, uid: str) -> None:
    """The stop of a client that left is found through its request."""
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert (shown["outcome"], shown["reason"]) == ("stopped", "client_disconnect")
    (stop_id,) = shown["stop_ids"]
    await stack.until(lambda: stack.gateway.stops._records[stop_id].resolved)
    receipt = (await stack.client.get(f"/v1/stops/{stop_id}")).json()
    assert (receipt["status"], receipt["reason"]) == ("reclaimed", "client_disconnect")
    assert receipt["trace_id"] == shown["trace_id"]


def watchers() -> list[asyncio.Task[Any]]:
    """The gateway's tasks that watch a client."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "watch-client"]


async def test_pipelined_request_does_not_hide_a_disconnect(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(tokens=False)
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    message = http_request("/v1/completions", completion())
    writer.write(message + message)
    await leader.wait_for(lambda: len(leader.running) == 1)
    reset(writer)
    await stack.quiet()
    assert not leader.running


async def test_case_g05_send_and_reset_1000_times(stack: Stack, leader: Leader) -> None:
    leader.plan = Plan(chunks=None, pace_s=0.001)
    messages = [
        http_request(route, make_body(stream=stream))
        for route, make_body in BODIES.items()
        for stream in (False, True)
    ]

    async def once(number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(messages[number % len(messages)])
        # From "before it was read" to "some tokens": 0 to 4 ms, the same in every run.
        await asyncio.sleep((number % 9) * 0.0005)
        reset(writer)

    for first in range(0, LOOPS, 10):
        await asyncio.gather(*(once(first + offset) for offset in range(10)))
    await stack.quiet()
    await leader.wait_for(lambda: not leader.running)
    (session,) = stack.gateway.registry.sessions()
    await stack.until(lambda: not session.outstanding and not session.live)
    await stack.until(lambda: not watchers())
    # The gateway is as good as new.
    leader.plan = Plan()
    assert (await stack.client.post("/v1/completions", json=completion())).status_code == 200


async def test_case_g07_stream_torn_down_by_a_cancel_1000_times(
    stack: Stack, leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancel and a disconnect race over a stream; whoever wins, one clean end."""
    leader.plan = Plan(chunks=None, pace_s=0.001)
    message = http_request("/v1/chat/completions", chat(stream=True))

    async def once(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(message)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 200")
        uid = head.split("x-request-id: ")[1].split("\r\n")[0]
        cancel = f"POST /v1/requests/{uid}/cancel HTTP/1.1\r\nhost: x\r\n"
        cancel += "authorization: Bearer admin-key\r\ncontent-length: 0\r\n\r\n"
        _, other = await asyncio.open_connection("127.0.0.1", stack.port)
        other.write(cancel.encode())
        if number % 2:
            rest = await reader.readuntil(b"0\r\n\r\n")
            assert rest.count(b'"finish_reason":"abort"') == 1
            assert rest.count(b"data: [DONE]") == 1
            writer.close()
        else:
            reset(writer)
        other.close()

    for first in range(0, LOOPS, 10):
        await asyncio.gather(*(once(first + offset) for offset in range(10)))
    await stack.quiet()
    await leader.wait_for(lambda: not leader.running)
    await stack.until(lambda: not watchers())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_case_g10_reader_that_does_not_read_then_leaves(make: Make, leader: Leader) -> None:
    stack = await make([leader], slow_reader_bytes_max=1 << 30)
    big = "x" * (1 << 20)
    leader.plan = Plan(chunks=[big] * 100, pace_s=0.01)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", stack.port))
    await loop.sock_sendall(sock, http_request("/v1/completions", completion(stream=True)))
    # Text waits, so a send is blocked.
    await stack.until(lambda: any(r._pending_chars for r in stack.gateway.table.live()))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    await stack.quiet()
    assert not leader.running


@pytest.mark.parametrize(
    "limits", [{"slow_reader_s": 0.2, "slow_reader_bytes_max": 1 << 30}, {"slow_reader_s": 60}]
)
async def test_case_g10_reader_that_never_reads_is_let_go(
    make: Make, leader: Leader, limits: dict[str, Any]
) -> None:
    stack = await make([leader], **limits)
    leader.plan = Plan(chunks=["x" * (1 << 20)] * 1000, pace_s=0.002)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=1024)
    writer.write(http_request("/v1/completions", completion(stream=True)))
    await leader.wait_for(lambda: len(leader.running) == 1)
    await stack.quiet()
    assert not leader.running
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        while True:
            await reader.readexactly(1 << 16)
    writer.close()
