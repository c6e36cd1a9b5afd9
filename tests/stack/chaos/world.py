"""The stack under test: one group, two gateways, Redis, and their processes."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import redis.asyncio as redis

from stopway_cli.stack import ports
from stopway_cli.stack.config import LOOPBACK, StackConfig
from stopway_cli.stack.local import LocalStack
from stopway_cli.stack.processes import Command, Guard, Supervisor
from stopway_core import names
from stopway_core.topology import EngineSettings

from .journal import Journal, Life
from .plan import ADMIN, KV_BLOCKS, MAX_MODEL_LEN, PEER_LOSS_S, Plan

MODEL = "smollm2-135m-instruct"
SECOND = "gateway2"
READ_S = 120.0  # of silence, when an answer is not streamed


async def until(condition: Callable[[], Awaitable[Any]], bound_s: float) -> bool:
    """Whether ``condition`` came true within ``bound_s``."""
    loop = asyncio.get_running_loop()
    end = loop.time() + bound_s
    while not await condition():
        if loop.time() > end:
            return False
        await asyncio.sleep(0.05)
    return True


class World:
    """``async with`` starts all of it and leaves nothing behind."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.journal = Journal()
        self.keys = {ADMIN: secrets.token_hex(12), "guest": secrets.token_hex(12)}
        settings = EngineSettings(
            drain_s=5.0,
            numerics="invariant",
            peer_loss_s=PEER_LOSS_S,
            max_model_len=MAX_MODEL_LEN,
            kv_blocks=KV_BLOCKS,
            max_running=16,
            draft_tokens=plan.draft_tokens,
            policy=plan.policy,
        )
        config = StackConfig(
            tensor=plan.tensor,
            pipeline=plan.pipeline,
            ranks_per_pod=plan.ranks_per_pod,
            port=0,
            settings=settings,
            api_keys=(f"{ADMIN}:admin={self.keys[ADMIN]}", f"guest={self.keys['guest']}"),
            state_dir=directory,
            # What a run asks about at its end must still be there.
            gateway_env={"STOPWAY_KEEP_S": "36000"},
        )
        self.stack = LocalStack(config)
        self._guard: Guard | None = None
        self._second: Supervisor | None = None
        self.http: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> World:
        await self.stack.__aenter__()
        try:
            await self._start_second()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for client in self.http:
                await client.aclose()
            if self._second is not None:
                await self._second.stop([SECOND], 10.0)
            if self._guard is not None:
                self._guard.close()
        finally:
            await self.stack.__aexit__(kind, error, trace)

    async def _start_second(self) -> None:
        """Another gateway with the first one's environment, on a port of its own."""
        port = ports.free_ports(1, LOOPBACK)[0]
        first = psutil.Process(self.stack.pids["gateway"])
        env = {**first.environ(), "STOPWAY_PORT": str(port)}
        self._guard = Guard()
        self._second = Supervisor(self.stack.logs_dir, self._guard)
        self._second.settled()
        self._second.start(Command(SECOND, self.stack.config.commands.gateway, env))
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=0)
        self.http = [
            httpx.AsyncClient(
                base_url=url,
                timeout=httpx.Timeout(READ_S, connect=5.0),
                limits=limits,
                trust_env=False,
            )
            for url in (self.stack.url, f"http://{LOOPBACK}:{port}")
        ]
        if not await until(self.ready, 60.0):
            raise AssertionError(f"the second gateway is not ready: {self._second.tail(SECOND)}")

    # --- gateways ------------------------------------------------------------------------

    def headers(self, tenant: str = ADMIN) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    def life(self, gateway: int) -> Life | None:
        """The process that serves as ``gateway`` now; None while it is being restarted."""
        if gateway == 0:
            pid = self.stack.pids.get("gateway")
        else:
            assert self._second is not None
            pid = self._second.pids.get(SECOND)
        life = None if pid is None else Life(gateway, pid)
        return None if life in self.journal.dead else life

    def alive(self, life: Life) -> bool:
        return self.life(life.gateway) == life

    async def is_up(self, gateway: int) -> bool:
        """Whether the gateway answers at all."""
        return await self._status(gateway, "/healthz") == 200

    async def ready(self) -> bool:
        """Whether both gateways can serve."""
        found = await asyncio.gather(*(self._status(gateway, "/readyz") for gateway in (0, 1)))
        return found == [200, 200]

    async def _status(self, gateway: int, path: str) -> int:
        try:
            return (await self.http[gateway].get(path, timeout=5.0)).status_code
        except httpx.HTTPError:
            return 0

    async def get(self, gateway: int, path: str, **query: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of a call with the admin's key."""
        response = await self.http[gateway].get(path, params=query, headers=self.headers())
        return response.status_code, response.json()

    async def ledger(self, gateway: int = 0) -> dict[str, Any]:
        """The leader's ledger, or a dict with ``error``."""
        try:
            _, body = await self.get(gateway, "/debug/ledger")
        except httpx.HTTPError as error:
            return {"error": repr(error)}
        groups: list[dict[str, Any]] = body.get("groups") or [{"error": "no group"}]
        return groups[0]

    # --- processes -----------------------------------------------------------------------

    def pods(self) -> list[psutil.Process]:
        """The pods' supervise processes, the leader's first."""
        pids = [pid for name, pid in sorted(self.stack.pids.items()) if name.startswith("stopway")]
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, by rank; some may be missing while they are restarted."""
        found = {int(p.environ()["STOPWAY_RANK"]): p for p in self._children("stopway_engine.rank")}
        return [found[rank] for rank in sorted(found)]

    def fronts(self) -> list[psutil.Process]:
        return self._children("stopway_engine.front")

    def pids_but_ranks(self) -> dict[str, int]:
        """Name -> pid of everything else that runs."""
        assert self._second is not None
        fronts = {f"front {index}": front.pid for index, front in enumerate(self.fronts())}
        return {**self.stack.pids, **self._second.pids, **fronts}

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for pod in self.pods():
            try:
                children = pod.children()
            except psutil.NoSuchProcess:
                continue
            for child in children:
                try:
                    if module in child.cmdline():
                        child.environ()
                        found.append(child)
                except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    continue
        return found

    # --- Redis ---------------------------------------------------------------------------

    def redis(self) -> redis.Redis:
        """A connection of our own, for one use."""
        return redis.Redis.from_url(
            self.stack.redis_url,
            decode_responses=True,
            socket_timeout=1.0,
            socket_connect_timeout=1.0,
        )

    @property
    def stops_stream(self) -> str:
        (group,) = self.stack.groups
        return names.stops_stream("local", group.name)

    @property
    def streams(self) -> tuple[str, str, str]:
        """The group's stops, the gateways' stops, the receipts."""
        return (
            self.stops_stream,
            names.gateway_stops_stream("local"),
            names.receipts_stream("local"),
        )


def left_behind(token: str) -> list[str]:
    """Command lines of live processes whose environment has ``token``, other than our own."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("CHAOS_RUN") == token:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
