"""Which sessions there are while leaders come to the list, leave it, and end."""

from __future__ import annotations

import pytest

from stopway_gateway.config import Settings
from stopway_gateway.registry import Registry


class Session:
    """What a registry needs of one; connected at once."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.group = name
        self.epoch: int | None = 1
        self.connected = True
        self.retiring = False
        self.superseded = False
        self.closed = False
        self.live: dict[str, object] = {}
        self.load = {"running": 1}

    @property
    def ready(self) -> bool:
        return self.connected and not self.retiring

    def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    def retire(self, retiring: bool) -> None:
        self.retiring = retiring

    def supersede(self, superseded: bool) -> None:
        self.superseded = superseded


@pytest.fixture
def registry() -> Registry:
    return Registry(Settings(), Session)


async def test_one_that_left_the_list_is_known_until_its_front_ends_the_session(
    registry: Registry,
) -> None:
    """Its pod drains or its ranks form anew, and other gateways may have requests there."""
    await registry._apply({"http://a": "g0"})
    (session,) = registry.ready()
    for _ in range(3):
        await registry._apply({})
    assert registry.sessions() == [session] and not session.closed
    assert registry.groups() == ["g0"] and registry.of_group("g0") is session
    assert list(registry.loads()) == [("g0", {"running": 1})]
    assert not registry.ready()
    session.connected = False
    await registry._apply({})
    assert session.closed and not registry.sessions() and not registry.groups()


async def test_one_that_comes_back_to_the_list_takes_requests_again(registry: Registry) -> None:
    await registry._apply({"http://a": "g0"})
    (session,) = registry.ready()
    await registry._apply({})
    await registry._apply({"http://a": "g0"})
    assert registry.ready() == [session]


async def test_one_that_is_listed_stays_while_it_is_not_connected(registry: Registry) -> None:
    await registry._apply({"http://a": "g0"})
    (session,) = registry.sessions()
    session.connected = False
    await registry._apply({"http://a": "g0"})
    assert registry.sessions() == [session] and registry.groups() == ["g0"]


async def test_the_newer_of_two_leaders_of_a_group_stands_for_it(registry: Registry) -> None:
    """A pod that was replaced and does not know may stay connected for ever."""
    await registry._apply({"http://a": "g0"})
    (old,) = registry.sessions()
    await registry._apply({"http://b": "g0"})
    (new,) = registry.ready()
    new.epoch = 2
    registry.compare_epochs()
    assert (old.superseded, new.superseded) == (True, False)
    assert registry.of_group("g0") is new and registry.groups() == ["g0"]
    assert len(list(registry.loads())) == 1
    old.live["uid"] = object()
    await registry._apply({"http://b": "g0"})
    assert not old.closed  # its requests have their time to end
    old.live.clear()
    await registry._apply({"http://b": "g0"})
    assert old.closed and registry.sessions() == [new]
