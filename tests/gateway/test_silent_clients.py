"""Clients whose machine is gone: no FIN, no reset, no acknowledgement of anything."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct

import pytest

from .conftest import Make, Stack, completion
from .leader import Leader, Plan
from .test_disconnect import http_request

SO_ATTACH_FILTER = 26
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0


def vanish(sock: socket.socket) -> None:
    """From now on the kernel drops whatever comes for ``sock``, as if its machine were off."""
    code = ctypes.create_string_buffer(DROP_ALL)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def connection_options(stack: Stack) -> dict[str, int]:
    """The options of the one connection that the gateway has accepted."""
    (connection,) = stack.server.server_state.connections
    sock = connection.transport.get_extra_info("socket")
    names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    found = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}
    return {**found, "SO_KEEPALIVE": sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


async def test_the_kernel_probes_an_idle_client(make: Make, leader: Leader) -> None:
    stack = await make([leader])
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    await stack.until(lambda: stack.server.server_state.connections)
    assert connection_options(stack) == {
        "SO_KEEPALIVE": 1,
        "TCP_USER_TIMEOUT": 30_000,
        "TCP_KEEPIDLE": 15,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
    }
    writer.close()


@pytest.mark.parametrize(
    ("plan", "stream"),
    [
        (Plan(tokens=False), False),  # nothing is ever sent to it
        (Plan(chunks=None, pace_s=0.05), False),
        (Plan(tokens=False), True),  # its headers were sent, and then nothing
        (Plan(chunks=None, pace_s=0.05), True),  # what is sent is not acknowledged
    ],
)
async def test_a_client_that_vanished_is_noticed(
    make: Make, leader: Leader, plan: Plan, stream: bool
) -> None:
    """Well before ``slow_reader_s``, and without a keepalive comment."""
    stack = await make([leader], tcp_user_timeout_s=1.0)
    leader.plan = plan
    with socket.create_connection(("127.0.0.1", stack.port)) as sock:
        sock.sendall(http_request("/v1/completions", completion(stream=stream)))
        await stack.until(lambda: any(r.accepted for r in stack.gateway.table.live()))
        if stream:
            await asyncio.to_thread(sock.recv, 16)
        (uid,) = leader.running
        vanish(sock)
        await stack.until(lambda: not len(stack.gateway.table))
        await leader.wait_for(lambda: not leader.running)
    shown = (await stack.client.get(f"/v1/requests/{uid}")).json()
    assert (shown["outcome"], shown["reason"]) == ("stopped", "client_disconnect")
