"""The whole stack on one machine, from the topology that the operator renders to pods."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from stopway_cli.errors import CliError, Exit
from stopway_cli.stack import config as cfg
from stopway_cli.stack import ports, preflight, redis, state
from stopway_cli.stack.processes import Backoff, Command, Guard, Supervisor
from stopway_core.topology import Addresses, GroupPlan, PodPlan

GATEWAY = "gateway"
_POLL_S = 0.1
_STOP_MARGIN_S = 15.0  # beyond the engine's own drain time: its last words, its front's end


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the start has come."""

    what: str
    groups_ready: int
    groups: int
    elapsed_s: float

    def __str__(self) -> str:
        return f"{self.what} ... groups ready {self.groups_ready}/{self.groups}"


class LocalStack:
    """``async with`` starts it, waits until every group serves, and leaves nothing behind.

    Enter and leave it in one thread: its processes die with the thread that started them.
    Raises ``CliError`` on entry, with everything ended again.
    """

    def __init__(
        self,
        config: cfg.StackConfig,
        on_progress: Callable[[Progress], None] = lambda _: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.config = config
        self._on_progress = on_progress
        self._backoff = backoff
        self._begun = time.monotonic()
        self._cleanup = contextlib.ExitStack()
        self._guard: Guard | None = None
        self._supervisor: Supervisor | None = None
        self._addresses: dict[str, Addresses] = {}  # by process name
        self.url = ""
        self.key = ""
        self.secret = ""
        self.redis_url = ""
        self.groups: tuple[GroupPlan, ...] = ()
        self.front_urls: dict[str, str] = {}
        self.state_dir = Path()
        self._run_dir = Path()
        self._env: dict[str, str] = {}

    @property
    def spans_dir(self) -> Path:
        """Where the processes keep their spans."""
        return self.state_dir / "spans"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def pids(self) -> dict[str, int]:
        """Process name -> pid: ``redis``, ``gateway``, ``stopway-g0-0`` (group, pod) ..."""
        return self._running.pids

    @property
    def restarts(self) -> dict[str, int]:
        """Process name -> how often it was restarted."""
        return dict(self._running.restarts)

    def log_tail(self, name: str) -> str:
        """The end of one process's log."""
        return self._running.tail(name)

    async def wait(self) -> None:
        """Return never; raise ``CliError`` when the stack cannot go on."""
        raise await asyncio.shield(self._running.failure)

    def hurry(self) -> None:
        """End everything now instead of draining: the user asked twice."""
        if self._supervisor is not None:
            self._supervisor.kill()

    async def __aenter__(self) -> LocalStack:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    @property
    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the stack is not running: enter it with `async with` first")
        return self._supervisor

    # --- start -----------------------------------------------------------------------------

    async def _start(self) -> None:
        self._report("checking model, ports and Redis", 0)
        checked = await asyncio.to_thread(preflight.check, self.config)
        self.groups = checked.groups
        keys = checked.keys or (("default", True, f"sk-stopway-{secrets.token_urlsafe(18)}"),)
        self.key = preflight.admin_key(keys)
        self.secret = secrets.token_urlsafe(32)
        self._guard = Guard()
        self._cleanup.callback(self._guard.close)
        self._make_directories(self._guard)
        self._supervisor = Supervisor(self.logs_dir, self._guard, self._backoff)
        await self._start_redis()
        self._start_groups()
        self._start_gateway(checked, keys)
        await self._until_ready()
        self._supervisor.settled()
        if self.config.register:
            self._register(self._guard)

    def _make_directories(self, guard: Guard) -> None:
        """One that is always removed, with a short path (sockets are in it), and the state's."""
        self._run_dir = Path(tempfile.mkdtemp(prefix="stopway-"))
        guard.remove_at_end(self._run_dir)
        self._cleanup.callback(shutil.rmtree, self._run_dir, ignore_errors=True)
        wanted = self.config.state_dir
        self.state_dir = self._run_dir if wanted is None else wanted.absolute()
        try:
            self.logs_dir.mkdir(parents=True, exist_ok=True)
            self.spans_dir.mkdir(exist_ok=True)
            self._cleanup.enter_context(_locked(self.state_dir / "lock"))
        except OSError as error:
            raise CliError(
                f"cannot use {self.state_dir} ({error.strerror}); choose another --state-dir",
                Exit.CONFIG,
            ) from None
        self._env = {**cfg.inherited_env(os.environ), "TMPDIR": str(self._run_dir)}

    async def _start_redis(self) -> None:
        if self.config.redis_url:
            self.redis_url = self.config.redis_url
            return
        self._report("starting Redis", 0)
        server = redis.EmbeddedRedis.on(ports.free_ports(1, cfg.LOOPBACK)[0])
        self.redis_url = server.url
        self._running.start(server.command(self._run_dir, self._env))
        up = asyncio.create_task(redis.wait_until_up(server.url))
        await self._unless_failed(up)

    def _start_groups(self) -> None:
        for group in self.groups:
            control, front = ports.free_ports(2, cfg.LOOPBACK)
            self.front_urls[group.name] = f"http://{cfg.LOOPBACK}:{front}"
            for pod in group.pods:
                self._running.start(self._pod_command(pod, control, front))

    def _pod_command(self, pod: PodPlan, control: int, front: int) -> Command:
        name = f"{pod.group}-{pod.index}"
        addresses = Addresses(
            leader_host=cfg.LOOPBACK,
            bind_host=cfg.LOOPBACK,
            control_port=control,
            front_port=front,
            health_port=ports.free_ports(1, cfg.LOOPBACK)[0],
            node="local",
            pod_name=name,
            pod_uid=f"{name}-{secrets.token_hex(4)}",
        )
        env = {
            **self._env,
            **pod.env(addresses),
            "STOPWAY_SECRET": self.secret,
            "STOPWAY_REDIS_URL": self.redis_url,
            "STOPWAY_SPANS_DIR": str(self.spans_dir),
            **self.config.engine_env,
        }
        return Command(name, self.config.commands.supervise, env)

    def _start_gateway(
        self, checked: preflight.Checked, keys: tuple[tuple[str, bool, str], ...]
    ) -> None:
        settings = checked.spec.settings
        groups = [{"name": name, "url": url} for name, url in self.front_urls.items()]
        groups_file = self._run_dir / "groups.json"
        groups_file.write_text(json.dumps({"groups": groups}))
        self.url = f"http://{_reachable(self.config.host)}:{checked.port}"
        env = {
            **self._env,
            "STOPWAY_BIND_HOST": self.config.host,
            "STOPWAY_PORT": str(checked.port),
            "STOPWAY_API_KEYS": ",".join(
                f"{tenant}{':admin' if admin else ''}={key}" for tenant, admin, key in keys
            ),
            "STOPWAY_SECRET": self.secret,
            "STOPWAY_SERVICE_UID": checked.spec.uid,
            "STOPWAY_REDIS_URL": self.redis_url,
            "STOPWAY_GROUPS_FILE": str(groups_file),
            "STOPWAY_MODEL_NAME": settings.model_name,
            "STOPWAY_DRAIN_S": str(settings.drain_s),
            "STOPWAY_OTLP_ENDPOINT": settings.otlp_endpoint,
            "STOPWAY_SPANS_DIR": str(self.spans_dir),
            **self.config.gateway_env,
        }
        self._running.start(Command(GATEWAY, self.config.commands.gateway, env))

    async def _until_ready(self) -> None:
        end = time.monotonic() + self.config.start_timeout_s
        waiting = asyncio.create_task(self._poll_ready(end))
        await self._unless_failed(waiting)

    async def _poll_ready(self, end: float) -> None:
        total = len(self.front_urls)
        groups = set(self.front_urls)
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                fronts = await asyncio.gather(
                    *(_answers(client, f"{url}/readyz") for url in self.front_urls.values())
                )
                ready = sum(fronts)
                if ready == total and groups <= await _ready_groups(client, self.url):
                    self._report("ready", ready)
                    return
                what = "loading the model" if ready < total else "waiting for the gateway"
                again = sum(self._running.restarts.values())
                self._report(f"{what} (restarted {again}x)" if again else what, ready)
                if time.monotonic() > end:
                    raise self._too_slow(ready)
                await asyncio.sleep(_POLL_S)

    def _too_slow(self, ready: int) -> CliError:
        tails = [f"--- {name}\n{self._running.tail(name)}" for name in self._running.restarts]
        return CliError(
            f"not ready after {self.config.start_timeout_s:.0f} s ({ready} of "
            f"{len(self.front_urls)} groups are); look at the logs below",
            Exit.CHILD,
            "\n".join(tails),
        )

    async def _unless_failed(self, task: asyncio.Task[None]) -> None:
        """Await ``task``, or raise the failure of a process that cannot be helped."""
        failure = self._running.failure
        try:
            both: set[asyncio.Future[Any]] = {task, failure}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _register(self, guard: Guard) -> None:
        pid = os.getpid()
        info = state.StackInfo(
            pid=pid,
            born=state.born(pid),
            url=self.url,
            key=self.key,
            spans_dir=str(self.spans_dir),
            logs_dir=str(self.logs_dir),
        )
        try:
            path = state.write(info)
        except OSError:  # serving matters more than being found
            return
        guard.remove_at_end(path)
        self._cleanup.callback(state.remove, path)

    def _report(self, what: str, ready: int) -> None:
        elapsed_s = time.monotonic() - self._begun
        self._on_progress(Progress(what, ready, self.config.groups, elapsed_s))

    # --- end -------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Users of Redis first, Redis last; then files. Always complete, even if cancelled."""
        try:
            if self._supervisor is not None:
                names = [name for name in self._supervisor.restarts if name != redis.NAME]
                grace_s = self.config.settings.drain_s + _STOP_MARGIN_S
                await self._supervisor.stop(names, grace_s)
                await self._supervisor.stop([redis.NAME], _STOP_MARGIN_S)
        finally:
            if self._supervisor is not None:
                self._supervisor.kill()
            self._cleanup.close()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(
                f"{path.parent} is used by another running stack; choose another --state-dir",
                Exit.CONFIG,
            ) from None
        yield


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def _ready_groups(client: httpx.AsyncClient, gateway: str) -> set[str]:
    """The groups that the gateway at ``gateway`` would give a request to."""
    try:
        reply = await client.get(f"{gateway}/readyz")
        return set(reply.json()["groups"]) if reply.status_code == 200 else set()
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return set()  # it only begins, or is not ours


def _reachable(host: str) -> str:
    """An address to reach ``host`` at from this machine."""
    if host in ("0.0.0.0", ""):
        return cfg.LOOPBACK
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
