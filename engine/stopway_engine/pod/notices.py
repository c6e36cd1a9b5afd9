"""The pod's one reader of the group's stop stream. It hands every entry to each rank of the pod.

It has a connection of its own, opened and closed with it; a command that fails or is cancelled
takes its connection along, so a late answer can never be taken for another's. The newest id is
resolved once, before the ranks start, and ``$`` is never passed again: an entry that comes while
the reader is away is read when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from stopway_core.signing import StopError, verify

BLOCK_MS = 2000
TIMEOUT_S = 5.0
BATCH = 512
RETRY_MAX_S = 2.0

OnNotice = Callable[[dict[str, Any], float], None]
"""(signed stop, Unix seconds at which it was read)"""


class NoticeReader:
    """Reads one stream for as long as it is asked to; losing Redis only makes it wait."""

    def __init__(self, url: str, stream: str, keys: Mapping[str, str], on_notice: OnNotice) -> None:
        self._url = url
        self._stream = stream
        self._keys = keys
        self._on_notice = on_notice
        self._cursor: str | None = None
        self._sequences: dict[str, int] = {}
        self.malformed = 0
        self.gaps = 0  # entries that a publisher sent and this reader never saw
        self.connected = False

    async def resolve(self) -> bool:
        """Find the newest id, so that nothing after this moment is missed. False without Redis."""
        client = self._client()
        try:
            newest = await client.xrevrange(self._stream, count=1)
            self._cursor = str(newest[0][0]) if newest else "0-0"
            return True
        except (RedisError, OSError):
            return False
        finally:
            await _close(client)

    async def run(self) -> None:
        """Read until cancelled."""
        delay = 0.1
        while True:
            if self._cursor is None and not await self.resolve():
                delay = await self._wait(delay)
                continue
            client = self._client()
            try:
                while True:
                    since = {self._stream: self._cursor or "0-0"}
                    entries = await client.xread(since, BATCH, BLOCK_MS)  # type: ignore[arg-type]
                    if not self.connected:
                        self.connected = True
                        print("the stop stream is being read", file=sys.stderr, flush=True)
                    delay = 0.1
                    for _, batch in _streams(entries):
                        for entry_id, fields in batch:
                            self._cursor = entry_id
                            self._take(fields)
            except (RedisError, OSError) as error:
                if self.connected:
                    self.connected = False
                    print(f"Redis is lost: {error}", file=sys.stderr, flush=True)
            finally:
                await _close(client)
            delay = await self._wait(delay)

    async def _wait(self, delay: float) -> float:
        await asyncio.sleep(delay * (0.5 + random.random()))
        return min(RETRY_MAX_S, delay * 2)

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(
            self._url,
            decode_responses=True,
            encoding_errors="replace",  # what is not UTF-8 is no stop, and must not end the reader
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            single_connection_client=True,
        )

    def _take(self, fields: Mapping[str, str]) -> None:
        now = time.time()
        try:
            entry = json.loads(fields.get("stop", ""))
            stop = verify(entry, self._keys, now=now)
        except (StopError, ValueError, RecursionError):
            self.malformed += 1  # counted and passed over
            return
        last = self._sequences.get(stop.publisher)
        if last is not None and stop.sequence > last + 1:
            self.gaps += stop.sequence - last - 1
        self._sequences[stop.publisher] = max(stop.sequence, last or 0)
        if len(self._sequences) > 10_000:
            self._sequences.pop(next(iter(self._sequences)))
        self._on_notice(entry, now)


def _streams(entries: Any) -> list[tuple[str, Any]]:
    """The answer of XREAD by stream, whether the client speaks RESP2 (pairs) or RESP3 (a map)."""
    if not entries:
        return []
    if isinstance(entries, dict):
        return [
            (name, batch)
            for name, batches in entries.items()
            for batch in (batches if batches and isinstance(batches[0], list) else [batches])
        ]
    return list(entries)


async def _close(client: redis.Redis) -> None:
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        await asyncio.wait_for(client.aclose(), 1.0)
