"""``/healthz``, ``/readyz`` and ``/metrics`` of the operator."""

from __future__ import annotations

import time

from aiohttp import web

from stopway_operator.api import Api
from stopway_operator.reconciler import Reconciler

RELIST_MISSED_MAX = 10  # an API server that is down is no reason to restart at once


class Health:
    """Alive means that watches tell what lists show, and that lists come through."""

    def __init__(self, reconciler: Reconciler, api: Api, resync_s: float) -> None:
        self._reconciler = reconciler
        self._api = api
        self._resync_s = resync_s
        self._started = time.monotonic()
        self._runner: web.AppRunner | None = None

    def problem(self, now: float) -> str:
        """Why the operator should be restarted, or an empty string."""
        since = self._reconciler.store.silent_since()
        if since is not None and now - since > 2.5 * self._resync_s:
            return f"a watch has not told for {now - since:.0f} s what a list shows"
        listed = self._reconciler.listed_at or self._started
        if now - listed > RELIST_MISSED_MAX * self._resync_s:
            return f"no list has come through for {now - listed:.0f} s"
        return ""

    async def start(self, port: int) -> None:
        """Serve on ``port``; 0 serves nothing."""
        if not port:
            return
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, port=port).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        problem = self.problem(time.monotonic())
        return web.Response(text=problem or "ok", status=500 if problem else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._reconciler.listed_at > 0
        return web.Response(text="ready" if ready else "listing", status=200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        values = {
            "stopway_operator_reconciles_total": self._reconciler.reconciles,
            "stopway_operator_errors_total": self._reconciler.errors,
            "stopway_operator_api_reads_total": self._api.reads,
            "stopway_operator_api_writes_total": self._api.writes,
        }
        lines = [f"# TYPE {name} counter\n{name} {value}" for name, value in values.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")
