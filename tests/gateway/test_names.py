"""Leaders behind a name: pods come and go, with other addresses or those of others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from .conftest import Make, MoreLeaders, Stack, completion, free_port
from .leader import Leader, Plan


class Name:
    """Pods behind one name, each with an address of its own; ``stack``'s gateway resolves it."""

    def __init__(
        self, make: Make, more_leaders: MoreLeaders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._make = make
        self._more_leaders = more_leaders
        self._loop = asyncio.get_running_loop()
        self._resolve = self._loop.getaddrinfo
        self._port = free_port()
        self.answers: list[str] | OSError = []
        self.asked = 0
        self.pods: dict[str, Leader] = {}  # by address
        self.stack: Stack
        monkeypatch.setattr(self._loop, "getaddrinfo", self._getaddrinfo)

    async def _getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        if host != "leaders.test":
            return await self._resolve(host, port, **options)
        self.asked += 1
        if isinstance(self.answers, OSError):
            raise self.answers
        twice = [*self.answers, *self.answers]  # as a name server does for several protocols
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in twice]

    async def start(self, count: int) -> None:
        """Groups g1, g2 and so on, all ready."""
        for n in range(1, count + 1):
            await self.pod(f"127.0.9.{n}", f"g{n}", 1)
        self.answers = list(self.pods)
        dns = f"leaders.test:{self._port}"
        self.stack = await self._make([], groups_file="", groups_dns=dns, epoch_grace_s=1.0)
        await self.ready_are(self.pods.values())

    async def pod(self, ip: str, group: str, epoch: int) -> Leader:
        """A pod that the name does not say yet."""
        leader = self.pods[ip] = await self._more_leaders(group, port=self._port, host=ip)
        leader.epoch = epoch
        return leader

    async def ready_are(self, leaders: Iterable[Leader]) -> None:
        registry = self.stack.gateway.registry
        urls = {leader.url for leader in leaders}
        await self.stack.until(lambda: {session.url for session in registry.ready()} == urls)

    async def unknown(self) -> None:
        """The name goes: no pod is ready."""
        self.answers = socket.gaierror(socket.EAI_NONAME, "unknown")
        await self.ready_are([])


@pytest.fixture
async def name(make: Make, more_leaders: MoreLeaders, monkeypatch: pytest.MonkeyPatch) -> Name:
    return Name(make, more_leaders, monkeypatch)


async def test_many_pods_are_behind_one_name(name: Name) -> None:
    await name.start(12)
    assert name.stack.gateway.registry.groups() == sorted(f"g{n}" for n in range(1, 13))


async def test_a_pod_is_replaced_behind_a_name(name: Name) -> None:
    """The same group at a new address. Its old pod does not know, and works on."""
    await name.start(4)
    stack, registry = name.stack, name.stack.gateway.registry
    old = name.pods.pop("127.0.9.1")
    old.plan = Plan(chunks=None, pace_s=0.005)
    for leader in name.pods.values():
        leader.plan = Plan(tokens=False)
    task = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await old.wait_for(lambda: old.running)
    new = await name.pod("127.0.9.21", "g1", 2)
    name.answers = list(name.pods)
    await name.ready_are(name.pods.values())
    for each in (old, new):
        await each.send({"type": "load", "running": each.epoch})
    await stack.until(lambda: dict(registry.loads())["g1"].get("running") == 2)
    text = (await stack.client.get("/metrics")).text
    assert text.count('stopway_requests_running{group="g1"}') == 1
    # The newer epoch ends the older: its client is told, and its lease breaks.
    reply = await task
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "rank_lost")
    await stack.until(lambda: len(registry.sessions()) == 4)
    await old.wait_for(lambda: not old.running)


async def test_a_name_server_that_fails_says_nothing_of_pods(name: Name) -> None:
    await name.start(4)
    name.answers, failures = socket.gaierror(socket.EAI_AGAIN, "try again"), name.asked + 3
    await name.stack.until(lambda: name.asked >= failures)
    await name.ready_are(name.pods.values())
    await name.unknown()


async def test_pods_come_back_at_the_addresses_of_others(name: Name) -> None:
    """A request that waits is taken as soon as they are there."""
    await name.start(4)
    stack, registry = name.stack, name.stack.gateway.registry
    await name.unknown()
    old = {ip: leader.group for ip, leader in name.pods.items()}
    await asyncio.gather(*(leader.stop() for leader in name.pods.values()))
    await stack.until(lambda: not registry.sessions())
    waiting = asyncio.create_task(stack.client.post("/v1/completions", json=completion()))
    await stack.until(lambda: len(stack.gateway.table) == 1)
    for ip, group in old.items():
        await name.pod(ip, {"g2": "g3", "g3": "g2"}.get(group, group), 2)
    name.answers = list(name.pods)
    assert (await waiting).status_code == 200
    await name.ready_are(name.pods.values())
    found = {session.url: session.group for session in registry.ready()}
    assert found == {leader.url: leader.group for leader in name.pods.values()}


async def test_a_mode_is_remembered_for_a_group_and_not_for_an_address(name: Name) -> None:
    """Its pod ends, and with it the session; another comes at another address."""
    await name.start(2)
    stack = name.stack
    pause = {"mode": "keep", "groups": ["g1"]}
    assert (await stack.client.post("/v1/groups/pause", json=pause)).status_code == 200
    old = name.pods.pop("127.0.9.1")
    word = old.word
    name.answers = list(name.pods)
    await old.stop()
    await stack.until(lambda: stack.gateway.registry.groups() == ["g2"])
    new = await name.pod("127.0.9.21", "g1", 2)
    name.answers = list(name.pods)
    await new.wait_for(lambda: new.reminders == [word])
    await name.ready_are(name.pods.values())
    assert new.mode == "keep" and not name.pods["127.0.9.2"].reminders
