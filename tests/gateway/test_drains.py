"""Drains: of a gateway, whose clients are to go elsewhere; of a group, which may come back."""

from __future__ import annotations

import asyncio

from .conftest import ADMIN, SOON_S, Make, Stack, chat, completion, events_of
from .leader import Leader, Plan


class Connection:
    """One that is kept alive, as a client's pool has them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._stack.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def get(self, path: str) -> tuple[int, dict[str, str]]:
        """The status and the headers of an answer."""
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {ADMIN['authorization']}\r\n\r\n"
        self._writer.write(head.encode())
        async with asyncio.timeout(SOON_S):
            status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            await self._reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers

    async def ended(self) -> bool:
        """Wait until the server has closed it."""
        async with asyncio.timeout(SOON_S):
            return await self._reader.read() == b""


async def test_answers_of_a_gateway_that_drains_are_the_last_on_their_connections(
    make: Make, leader: Leader
) -> None:
    stack = await make([leader], drain_s=10 * SOON_S)
    leader.plan = Plan(chunks=["a", "b"], tokens=False)
    body = chat(stream=True)
    async with (
        Connection(stack) as one,
        Connection(stack) as other,
        Connection(stack) as third,
        stack.client.stream("POST", "/v1/chat/completions", json=body) as stream,
    ):
        await leader.wait_for(lambda: leader.running)
        for connection in (one, other, third):
            status, headers = await connection.get("/v1/models")
            assert status == 200 and "connection" not in headers
        stack.server.begin_drain()
        await stack.until(lambda: stack.gateway.draining)
        for connection, path, expected in (
            (one, "/v1/models", 200),
            (other, "/readyz", 503),
            (third, "/nowhere", 404),
        ):
            status, headers = await connection.get(path)
            assert (status, headers["connection"]) == (expected, "close")
            assert await connection.ended()
        refused = await stack.client.post("/v1/completions", json=completion())
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        # What had begun goes on to its end.
        (uid,) = leader.running
        await leader._end(leader.jobs[uid], "eos", "finished", "stop")
        text = (await stream.aread()).decode()
        assert events_of(text)[-1] == "[DONE]" and "connection" not in stream.headers


async def test_the_time_of_a_drain_is_over_with_its_epoch(
    make: Make, leader: Leader, second: Leader
) -> None:
    """Its pod came back, and drains again: what it runs now has the time of that drain."""
    stack = await make([leader, second])
    for each in (leader, second):
        each.plan = Plan(tokens=False)
    body = completion(max_tokens=1000)
    tasks = []
    for each in (leader, second):
        tasks.append(asyncio.create_task(stack.client.post("/v1/completions", json=body)))
        await each.wait_for(lambda each=each: each.running)
    await leader._end(leader.jobs[leader.running[0]], "eos", "finished", "stop")
    assert (await tasks[0]).status_code == 200
    await leader.send({"type": "draining", "seconds": 0.1})
    await leader.say_hello(8)
    session = stack.gateway.registry.of_group("g0")
    await stack.until(lambda: session.epoch == 8)
    again = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await leader.wait_for(lambda: leader.running)
    await leader.send({"type": "draining", "seconds": 10 * SOON_S})
    await stack.until(lambda: session.draining)
    await second.send({"type": "draining", "seconds": 0.1})
    assert (await tasks[1]).status_code == 503  # as long as the first drain, and later
    (uid,) = leader.running
    assert not leader.stops
    await leader._end(leader.jobs[uid], "eos", "finished", "stop")
    assert (await again).status_code == 200
