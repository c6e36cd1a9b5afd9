"""Stops over Redis streams: a writer, and a reader with a connection and a cursor of its own.

Nothing waits on Redis. ``publish`` queues and returns; when Redis does not take an entry, the
caller hears of it at once and takes the direct path. No consumer groups: every reader reads all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from stopway_core.signing import sign
from stopway_core.types import Stop
from stopway_gateway.tasks import check_cancelled, end_tasks

_LOG = logging.getLogger(__name__)
_QUEUE_MAX = 10_000
_BATCH_MAX = 100
_PROBE_S = 0.5
_CONNECT_TIMEOUT_S = 1.0
_COMMAND_TIMEOUT_S = 1.0
_FAILURES = (RedisError, OSError, TimeoutError)


def connect(url: str, command_timeout_s: float = _COMMAND_TIMEOUT_S) -> Redis:
    """A client of one connection, whose every socket operation is bounded and never retried.

    Retries and failover belong to the callers, who know another path.
    """
    return Redis.from_url(
        url,
        protocol=2,
        max_connections=1,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=command_timeout_s,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
        encoding_errors="replace",  # what is not UTF-8 is no entry, and must not end a reader
    )


class _Entry(NamedTuple):
    stream: str
    field: str
    text: str
    on_failed: Callable[[], None]


class Publisher:
    """Adds signed stops to streams, each with its number in that stream."""

    def __init__(
        self,
        url: str,
        publisher: str,
        secret: str,
        age_s: float,
        on_health: Callable[[bool], None],
    ) -> None:
        self.healthy = False
        self._url = url
        self._publisher = publisher
        self._secret = secret
        self._age_s = age_s
        self._on_health = on_health
        self._sequences: dict[str, int] = {}
        self._queue: asyncio.Queue[_Entry] = asyncio.Queue(_QUEUE_MAX)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to reach for Redis, and to write."""
        if self._url:
            self._task = asyncio.create_task(self._run(), name="stop-publisher")

    async def close(self) -> None:
        """Stop writing; what is queued has taken, or takes, the direct path."""
        await end_tasks(self._task)

    def publish(
        self, stop: Stop, stream: str, on_failed: Callable[[], None]
    ) -> tuple[dict[str, Any], bool]:
        """The signed stop, and whether it is on its way through Redis.

        ``on_failed`` is called when Redis turns out not to take it. An entry that never goes to
        the stream uses no number, so that readers see no gap where there is none.
        """
        going = self.healthy and not self._queue.full()
        sequence = 0
        if going:
            sequence = self._sequences.get(stream, 0) + 1
            self._sequences[stream] = sequence
        signed = sign(replace(stop, publisher=self._publisher, sequence=sequence), self._secret)
        if going:
            text = json.dumps(signed, separators=(",", ":"))
            self._queue.put_nowait(_Entry(stream, "stop", text, on_failed))
        return signed, going

    def publish_receipt(
        self, receipt: dict[str, Any], stream: str, on_failed: Callable[[], None]
    ) -> bool:
        """Tell the other gateways what became of a stop here; False, or ``on_failed``, if not."""
        going = self.healthy and not self._queue.full()
        if going:
            text = json.dumps(receipt, separators=(",", ":"))
            self._queue.put_nowait(_Entry(stream, "receipt", text, on_failed))
        return going

    async def _run(self) -> None:
        while True:
            client = connect(self._url)
            try:
                await client.ping()
                self._set_health(True)
                while True:
                    await self._write(client)
                    check_cancelled()
            except _FAILURES as error:
                _LOG.warning("Redis takes no stops now, they go direct: %s", error)
            finally:
                self._set_health(False)
                # A connection that failed, or whose command was cancelled, may still have a reply
                # on its way: it is never used again.
                await _drop(client)
            await asyncio.sleep(_PROBE_S * random.uniform(0.5, 1.5))

    async def _write(self, client: Redis) -> None:
        batch = [await self._queue.get()]
        while len(batch) < _BATCH_MAX and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        horizon = int((time.time() - self._age_s) * 1000)
        try:
            pipe = client.pipeline(transaction=False)
            for entry in batch:
                pipe.xadd(
                    entry.stream, {entry.field: entry.text}, minid=str(horizon), approximate=True
                )
            results = await pipe.execute(raise_on_error=False)
        except BaseException:
            self._fail(batch)
            raise
        self._fail([e for e, r in zip(batch, results, strict=True) if isinstance(r, Exception)])

    def _set_health(self, healthy: bool) -> None:
        self.healthy = healthy
        self._on_health(healthy)
        if not healthy:
            waiting = []
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            self._fail(waiting)

    @staticmethod
    def _fail(entries: list[_Entry]) -> None:
        for entry in entries:
            entry.on_failed()


class Reader:
    """Reads streams from where they stood when it first asked; never skips to the end again."""

    BLOCK_S = 2.0

    def __init__(self, url: str, streams: dict[str, Callable[[dict[str, str]], None]]) -> None:
        self._url = url
        self._handlers = streams
        self._cursors: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self.positioned = asyncio.Event()

    def start(self) -> None:
        """Begin to read."""
        if self._url:
            self._task = asyncio.create_task(self._run(), name="stop-reader")

    async def close(self) -> None:
        """Stop reading; its connection goes with it."""
        await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            # Longer than a blocking read, so that a silent server is told from an idle stream.
            client = connect(self._url, command_timeout_s=self.BLOCK_S + 2.0)
            try:
                await self._position(client)
                while True:
                    await self._read(client)
                    check_cancelled()
            except _FAILURES as error:
                _LOG.debug("the reader of stops lost Redis: %s", error)
            finally:
                await _drop(client)
            await asyncio.sleep(_PROBE_S * random.uniform(0.5, 1.5))

    async def _position(self, client: Any) -> None:
        for stream in self._handlers:
            if stream not in self._cursors:
                newest = await client.xrevrange(stream, count=1)
                self._cursors[stream] = newest[0][0] if newest else "0-0"
        self.positioned.set()

    async def _read(self, client: Any) -> None:
        replies = await client.xread(dict(self._cursors), count=200, block=int(self.BLOCK_S * 1000))
        for stream, entries in replies or []:
            for entry_id, fields in entries:
                # The cursor moves first: an entry that can't be handled must not be read forever.
                self._cursors[stream] = entry_id
                self._handlers[stream](fields)


class Gaps:
    """Counts entries that were added and not read, by each publisher's own numbers."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def missed(self, publisher: str, sequence: int) -> int:
        """How many entries are missing between this one and the publisher's last one seen."""
        last = self._last.get(publisher)
        if last is None and len(self._last) >= 1000:
            self._last.pop(next(iter(self._last)))
        self._last[publisher] = max(sequence, last or 0)
        return max(0, sequence - last - 1) if last is not None else 0


async def _drop(client: Redis) -> None:
    with contextlib.suppress(*_FAILURES):
        await client.aclose(close_connection_pool=True)
