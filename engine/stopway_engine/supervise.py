"""The main process of a pod: ``python -m stopway_engine.supervise``.

It starts the pod's ranks (and on the leader's pod the front), restarts all of the pod's ranks
when one is lost, with its own backoff so that no crash loop of the kubelet's staggers a group,
reads the group's stop stream once for all of them, answers probes, and exports the spans that
they send. It decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stopway_core import names
from stopway_core.wire import Frame
from stopway_engine.config import EXIT_CONFIG, ConfigError, PodConfig, load_config
from stopway_engine.http import HttpServer
from stopway_engine.modelspec import ModelError, read_spec, resolve_model
from stopway_engine.numerics import Numerics, thread_environment, threads_for
from stopway_engine.parallel import plan_shards
from stopway_engine.pod.children import FrontProcess, RankProcess
from stopway_engine.pod.notices import NoticeReader
from stopway_engine.pod.watchdog import Watchdog
from stopway_telemetry import Exporter, SpanRecord

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
EXIT_GRACE_S = 5.0


class Supervisor:
    """The pod. ``run`` returns its exit code."""

    def __init__(self, config: PodConfig, run_dir: Path, health: socket.socket) -> None:
        self.config = config
        self._health = health
        self._ranks: list[RankProcess] = []
        self._front: FrontProcess | None = None
        self._last_epoch = 0
        self._draining = asyncio.Event()
        self._drain_until = 0.0
        self._fatal = ""
        self._restarts = 0
        threads = config.threads or threads_for(config.ranks_per_pod, Numerics(config.numerics))
        self._env = {
            **os.environ,
            **thread_environment(threads),
            "STOPWAY_THREADS": str(threads),
            "STOPWAY_FRONT_SOCKET": str(run_dir / "front.sock"),
        }
        self._reader = (
            NoticeReader(
                config.redis_url,
                names.stops_stream(config.service_uid, config.group),
                {"1": config.secret},
                self._on_notice,
            )
            if config.redis_url
            else None
        )
        self._exporter = Exporter(
            "stopway-engine",
            {
                "service.instance.id": config.pod_name or config.group,
                "k8s.pod.name": config.pod_name,
                "k8s.node.name": config.node,
                "stopway.group": config.group,
            },
            config.otlp_endpoint or None,
            config.spans_dir or None,
        )

    # --- life ----------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until SIGTERM (0) or until a restart cannot help (``EXIT_CONFIG``)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        tasks = [asyncio.create_task(self._probes()), asyncio.create_task(self._watchdog())]
        for task in tasks:
            task.add_done_callback(self._part_ended)
        if self._reader is not None:
            # Before any rank can say HELLO, so that no stop falls between.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reader.resolve(), 2.0)
            tasks.append(asyncio.create_task(self._keep_reading(self._reader)))
        front = asyncio.create_task(self._keep_front()) if self.config.leader else None
        try:
            await self._keep_ranks()
        finally:
            for rank in self._ranks:
                rank.kill()
            if front is not None:
                await self._end_front(front)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._exporter.shutdown, 2.0)
        if self._fatal:
            print(self._fatal, file=sys.stderr, flush=True)
            return EXIT_CONFIG
        return 0

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        """A pod without its probes or its watchdog must not go on as if it had them."""
        if not task.cancelled() and not self._draining.is_set():
            print(f"a part of supervise ended: {task.exception()!r}", file=sys.stderr, flush=True)
            self._drain()

    async def _keep_reading(self, reader: NoticeReader) -> None:
        """Whatever ends the reader is said, and it begins again where it was."""
        while True:
            try:
                await reader.run()
            except Exception as error:
                print(f"the reader of stops failed: {error!r}", file=sys.stderr, flush=True)
                await asyncio.sleep(1.0)

    async def _keep_ranks(self) -> None:
        backoff = BACKOFF_FIRST_S
        while not self._draining.is_set():
            env = {**self._env, "STOPWAY_LAST_EPOCH": str(self._last_epoch)}
            self._ranks = [RankProcess(rank, env, self._on_frame) for rank in self.config.ranks]
            lives = [asyncio.create_task(rank.run()) for rank in self._ranks]
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            clean = any(life.done() and life.result() == 0 for life in lives)
            served = any(rank.state in ("ready", "draining") for rank in self._ranks)
            # The epoch is over for all of them. Those that leave by themselves get a moment.
            await asyncio.wait(lives, timeout=EXIT_GRACE_S if clean else 0.2)
            for rank in self._ranks:
                rank.kill()
            await asyncio.wait(lives)
            self._fatal = next((rank.fatal for rank in self._ranks if rank.fatal), "")
            if self._fatal:
                return
            if served:
                backoff = BACKOFF_FIRST_S
            if not self._draining.is_set():
                self._restarts += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._draining.wait(), backoff)
                backoff = min(BACKOFF_MAX_S, backoff * 2)

    async def _keep_front(self) -> None:
        backoff = BACKOFF_FIRST_S
        while True:
            started = time.monotonic()
            self._front = FrontProcess(self._env)
            code = await self._front.run()
            if code == EXIT_CONFIG:
                self._fatal = self._fatal or "the front could not start; its message is above"
                self._drain()
                return
            if time.monotonic() - started > 30:
                backoff = BACKOFF_FIRST_S
            await asyncio.sleep(backoff)
            backoff = min(BACKOFF_MAX_S, backoff * 2)

    async def _end_front(self, keeper: asyncio.Task[None]) -> None:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if self._front is not None:
            self._front.stop()
            try:
                await asyncio.wait_for(self._front.run(), EXIT_GRACE_S)
            except TimeoutError:
                self._front.kill()
                await self._front.run()

    def _drain(self) -> None:
        """SIGTERM: what serves drains; what does not serve yet has nothing to drain.

        Which of the two a rank is, it alone knows: what was heard of it here may be old.
        """
        if self._draining.is_set():
            return
        self._draining.set()
        self._drain_until = time.monotonic() + self.config.drain_s + EXIT_GRACE_S
        for rank in self._ranks:
            rank.drain()

    async def _watchdog(self) -> None:
        """Kill what is silent, and what has not left when a drain must be over."""
        watchdog = Watchdog(self.config.peer_loss_s)
        while True:
            await asyncio.sleep(watchdog.period_s)
            now = time.monotonic()
            for rank in watchdog.silent(self._ranks, now):
                print(f"rank {rank.rank} is silent: killed", file=sys.stderr, flush=True)
                rank.kill()
            if self._drain_until and now > self._drain_until:
                for rank in self._ranks:
                    if rank.code is None:
                        print(f"rank {rank.rank} has not drained: killed", file=sys.stderr)
                        rank.kill()

    # --- what comes ----------------------------------------------------------------------

    def _on_frame(self, rank: RankProcess, frame: Frame) -> None:
        body = frame.body
        if "state" in body:
            rank.state, rank.epoch = body["state"], body["epoch"]
            self._last_epoch = max(self._last_epoch, rank.epoch)
        if "fatal" in body:
            rank.fatal = body["fatal"]
        for record in body.get("spans", ()):
            self._exporter.emit(SpanRecord.from_json(record))

    def _on_notice(self, entry: dict[str, Any], read_at: float) -> None:
        for rank in self._ranks:
            rank.send({"notice": entry, "read_at": read_at})

    # --- probes --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every rank of this pod is in a complete epoch."""
        return bool(self._ranks) and all(
            rank.code is None and rank.state == "ready" for rank in self._ranks
        )

    async def _probes(self) -> None:
        async def healthz(_: Request) -> JSONResponse:
            return JSONResponse({"status": "ok"})

        async def readyz(_: Request) -> JSONResponse:
            status = {
                "ready": self.ready,
                "epoch": self._last_epoch,
                "restarts": self._restarts,
                "stop_stream": None
                if self._reader is None
                else {
                    "connected": self._reader.connected,
                    "gaps": self._reader.gaps,
                    "malformed": self._reader.malformed,
                },
                "ranks": {str(r.rank): {"state": r.state, "pid": r.pid} for r in self._ranks},
            }
            return JSONResponse(status, 200 if self.ready else 503)

        app = Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz)])
        await HttpServer(app).serve(sockets=[self._health])


def check(config: PodConfig) -> None:
    """What would fail in every rank alike, found before any is started."""
    path = resolve_model(config.model)
    plan_shards(read_spec(path), config.tensor, config.pipeline)


def health_socket(config: PodConfig) -> socket.socket:
    """Where probes are answered. Raises ``ConfigError`` when the port is taken."""
    try:
        return socket.create_server((config.bind_host, config.health_port))
    except OSError as error:
        raise ConfigError(
            f"cannot answer probes on {config.bind_host}:{config.health_port} ({error.strerror}); "
            "choose another STOPWAY_HEALTH_PORT"
        ) from None


def main() -> None:
    """The process: exits with 0 after a drain, with ``EXIT_CONFIG`` when a restart cannot help."""
    try:
        config = load_config()
        check(config)
        health = health_socket(config)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG)
    with health, tempfile.TemporaryDirectory(prefix="stopway-") as run_dir:
        sys.exit(asyncio.run(Supervisor(config, Path(run_dir), health).run()))


if __name__ == "__main__":
    main()
