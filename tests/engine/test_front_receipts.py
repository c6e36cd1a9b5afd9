"""Receipts on Redis: what is lost while it is away is said, once, and counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisDown

from stopway_engine.front import receipts
from stopway_engine.front.receipts import ReceiptPublisher


class FakeRedis:
    """Takes entries, unless it is ``down``."""

    def __init__(self) -> None:
        self.down = False
        self.failures = 0
        self.added: list[str] = []
        self.changed = asyncio.Event()

    async def xadd(self, stream: str, fields: dict[str, str]) -> str:
        self.changed.set()
        if self.down:
            self.failures += 1
            raise RedisDown("connection refused")
        self.added.append(json.loads(fields["receipt"])["stop_id"])
        return f"{10**12}-0"

    async def xtrim(self, *_: Any, **__: Any) -> None: ...

    async def aclose(self) -> None: ...


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> FakeRedis:
    fake = FakeRedis()
    monkeypatch.setattr(receipts, "RETRY_S", 0.001)
    monkeypatch.setattr(receipts, "QUEUE_MAX", 2)
    monkeypatch.setattr(receipts.redis.Redis, "from_url", lambda *_, **__: fake)
    return fake


async def until(redis: FakeRedis, condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            redis.changed.clear()
            await redis.changed.wait()
            await asyncio.sleep(0)


async def test_what_redis_did_not_take_is_told(
    redis: FakeRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = ReceiptPublisher("redis://host:1", "stream")
    for number in range(3):  # one more than the queue holds
        publisher.publish({"stop_id": str(number)})
    redis.down = True
    running = asyncio.create_task(publisher.run())
    await until(redis, lambda: redis.failures == 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "connection refused" in line and "STOPWAY_REDIS_URL" in line
    redis.down = False
    for number in (3, 4):
        publisher.publish({"stop_id": str(number)})
        await until(redis, lambda wanted=str(number): wanted in redis.added)
    (line,) = capsys.readouterr().err.splitlines()
    assert "again" in line and "3 did not" in line
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert redis.added == ["3", "4"]


async def test_without_redis_nothing_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    publisher = ReceiptPublisher("", "stream")
    publisher.publish({"stop_id": "1"})
    await publisher.run()
    assert not capsys.readouterr().err


async def test_the_last_receipts_are_added_before_it_ends(redis: FakeRedis) -> None:
    publisher = ReceiptPublisher("redis://host:1", "stream")
    running = asyncio.create_task(publisher.run())
    publisher.publish({"stop_id": "1"})
    publisher.publish({"stop_id": "2"})
    await publisher.flush(5.0)
    assert redis.added == ["1", "2"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_redis_that_does_not_answer_holds_up_no_end(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "xtrim", lambda *_, **__: asyncio.Event().wait())
    publisher = ReceiptPublisher("redis://host:1", "stream")
    running = asyncio.create_task(publisher.run())
    publisher.publish({"stop_id": "1"})
    await publisher.flush(0.01)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
