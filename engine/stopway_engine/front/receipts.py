"""Receipts on Redis, for gateways that have no session with this leader: best effort, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

QUEUE_MAX = 10_000
KEEP_S = 600
TIMEOUT_S = 2.0
RETRY_S = 1.0


class ReceiptPublisher:
    """Adds receipts to the service's stream from a queue; a full queue or no Redis loses some."""

    def __init__(self, url: str, stream: str) -> None:
        self._url = url
        self._stream = stream
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUE_MAX)
        self._failing = False
        self._lost = 0  # since Redis took one

    def publish(self, receipt: dict[str, Any]) -> None:
        """Queue a receipt; never waits."""
        if not self._url:
            return
        try:
            self._queue.put_nowait(receipt)
        except asyncio.QueueFull:
            self._lost += 1

    async def run(self) -> None:
        """Add what is queued until cancelled."""
        while self._url:
            client = redis.Redis.from_url(
                self._url,
                decode_responses=True,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
            )
            try:
                while True:
                    receipt = await self._queue.get()
                    try:
                        await self._add(client, receipt)
                    finally:
                        self._queue.task_done()
                    self._succeeded()
            except (RedisError, OSError) as error:
                self._failed(error)
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(RedisError, OSError, TimeoutError):
                    await asyncio.wait_for(client.aclose(), 1.0)

    async def flush(self, timeout_s: float) -> None:
        """Wait until what is queued was added, at most so long: the last word of a drain."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), timeout_s)

    async def _add(self, client: redis.Redis, receipt: dict[str, Any]) -> None:
        added = await client.xadd(self._stream, {"receipt": json.dumps(receipt)})
        oldest = int(str(added).split("-")[0]) - KEEP_S * 1000
        await client.xtrim(self._stream, minid=oldest, approximate=True)

    def _failed(self, error: Exception) -> None:
        """Say so once for each time that Redis is away; one receipt goes with each failure."""
        self._lost += 1
        if not self._failing:
            self._failing = True
            _log(
                f"Redis takes no receipts ({error}): gateways without a session here miss them; "
                "check STOPWAY_REDIS_URL and that Redis is up"
            )

    def _succeeded(self) -> None:
        if self._lost:
            _log(f"Redis takes receipts again; {self._lost} did not come to the stream")
        self._failing = False
        self._lost = 0


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
