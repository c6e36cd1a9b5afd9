"""Sends a stop again, past Redis, until its turn is known: batched, with backoff and jitter."""

from __future__ import annotations

import asyncio
import random
import time

import httpx

from stopway_gateway.config import Settings
from stopway_gateway.metrics import Metrics
from stopway_gateway.registry import Registry
from stopway_gateway.session import LeaderSession
from stopway_gateway.stops import Part
from stopway_gateway.tasks import end_tasks

_TICK_S = 0.02
_BATCH_MAX = 500


class Resender:
    """Holds the parts whose turn is not known; each is due at a time of its own."""

    def __init__(self, settings: Settings, registry: Registry, metrics: Metrics) -> None:
        self._settings = settings
        self._registry = registry
        self._metrics = metrics
        self._pending: dict[tuple[str, str], Part] = {}
        self._wake = asyncio.Event()
        self._posting: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._client = httpx.AsyncClient(
            timeout=2.0,
            trust_env=False,
            headers={"Authorization": f"Bearer {settings.secret.get_secret_value()}"},
        )

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="stop-resender")

    async def close(self) -> None:
        """Stop sending."""
        await end_tasks(self._task, *self._posting.values())
        await self._client.aclose()

    def add(self, part: Part, *, at_once: bool) -> None:
        """Send ``part`` when its turn is not known in time; ``at_once`` past Redis, too."""
        self._pending[part.stop_id, part.group] = part
        self._schedule(part)
        if at_once:
            self._send(part)
        self._wake.set()

    def discard(self, part: Part) -> None:
        """Its stop is forgotten."""
        self._pending.pop((part.stop_id, part.group), None)

    def direct(self, part: Part) -> None:
        """Send it on the leader's session now; without one it stays due."""
        if not part.settled:
            self._send(part)

    def _send(self, part: Part) -> None:
        session = self._registry.of_group(part.group)
        if session is not None and session.send_stop(part.signed):
            self._metrics.direct_stops.labels(part.group).inc()

    def _schedule(self, part: Part) -> None:
        delay = min(
            self._settings.resend_after_s * 2 ** min(part.attempts, 16), self._settings.resend_max_s
        )
        # Never before resend_after_s: the first send on the usual path deserves its chance.
        part.due = time.monotonic() + delay * (1 + 0.25 * random.random())

    async def _run(self) -> None:
        while True:
            if not self._pending:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(_TICK_S)
            due: dict[str, tuple[LeaderSession, list[Part]]] = {}
            now = time.monotonic()
            for key, part in list(self._pending.items()):
                if part.settled:
                    del self._pending[key]
                elif part.due <= now:
                    session = self._registry.of_group(part.group)
                    if session is None:
                        self._schedule_again(part)
                    elif session.url not in self._posting:
                        due.setdefault(session.url, (session, []))[1].append(part)
            for session, parts in due.values():
                self._post_soon(session, parts[:_BATCH_MAX])

    def _schedule_again(self, part: Part) -> None:
        part.attempts += 1
        self._schedule(part)

    def _post_soon(self, session: LeaderSession, parts: list[Part]) -> None:
        task = asyncio.create_task(self._post(session, parts))
        self._posting[session.url] = task
        task.add_done_callback(lambda _: self._posting.pop(session.url, None))

    async def _post(self, session: LeaderSession, parts: list[Part]) -> None:
        for part in parts:
            self._schedule_again(part)
            self._metrics.direct_stops.labels(part.group).inc()
        try:
            reply = await self._client.post(
                f"{session.url}/internal/v1/stops", json={"stops": [p.signed for p in parts]}
            )
            reply.raise_for_status()
        except (httpx.HTTPError, OSError):
            for part in parts:
                session.send_stop(part.signed)
