"""Faults: each does its harm at its time, and takes it back where that does not heal by itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import psutil
from redis.exceptions import RedisError

from stopway_core import names

from .plan import Fault
from .world import World, until

GONE_S = 30.0  # for a dead gateway's requests to leave every leader, after the last fault


class Faults:
    """Carries out the faults of a plan."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._frozen: list[psutil.Process] = []
        self._watches: list[asyncio.Task[None]] = []
        self._ways: dict[str, Callable[[Fault], Awaitable[str]]] = {
            "rank_killed": self._rank_killed,
            "leader_killed": self._leader_killed,
            "rank_frozen_long": self._rank_frozen,
            "rank_frozen_short": self._rank_frozen,
            "front_killed": self._front_killed,
            "children_killed": self._children_killed,
            "pod_killed": self._pod_killed,
            "pod_drained": self._pod_drained,
            "pod_frozen": self._pod_frozen,
            "redis_killed": self._redis_killed,
            "redis_frozen": self._redis_frozen,
            "redis_flushed": self._redis_flushed,
            "streams_trimmed": self._streams_trimmed,
            "gateway_killed": self._gateway_killed,
            "gateway_frozen": self._gateway_frozen,
        }

    async def run(self, faults: tuple[Fault, ...], begun: float) -> None:
        """All of them, each at its time, overlapping where their times do."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(self._one(fault, begun))

    async def heal(self) -> None:
        """Wake whatever is still frozen, then see that no request of a dead gateway is left."""
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        await asyncio.gather(*self._watches)

    async def _one(self, fault: Fault, begun: float) -> None:
        await asyncio.sleep(max(0.0, begun + fault.at_s - time.monotonic()))
        journal = self._world.journal
        journal.first_fault = journal.first_fault or time.monotonic()
        try:
            victim = await self._ways[fault.kind](fault)
        except (psutil.NoSuchProcess, RedisError, OSError) as error:
            victim = f"nobody ({type(error).__name__})"  # another fault was first
        journal.count(fault.kind if not victim.startswith("nobody") else f"{fault.kind}: nobody")
        print(f"{time.monotonic() - journal.began:6.1f} s  {fault.kind}: {victim}", flush=True)

    # --- ranks and fronts ------------------------------------------------------------------

    async def _rank_killed(self, fault: Fault) -> str:
        ranks = self._world.ranks()[1:]
        return self._kill(ranks[int(fault.pick * len(ranks))] if ranks else None)

    async def _leader_killed(self, fault: Fault) -> str:
        ranks = self._world.ranks()
        return self._kill(ranks[0] if ranks else None)

    async def _front_killed(self, fault: Fault) -> str:
        fronts = self._world.fronts()
        return self._kill(fronts[0] if fronts else None)

    async def _children_killed(self, fault: Fault) -> str:
        """All that one pod's supervise started, at once."""
        pod = self._pod(fault)
        children = pod.children() if pod is not None else []
        return ", ".join([self._kill(child) for child in children]) or "nobody"

    def _pod(self, fault: Fault) -> psutil.Process | None:
        """The supervise of some pod."""
        pods = self._world.pods()
        return pods[int(fault.pick * len(pods))] if pods else None

    async def _pod_killed(self, fault: Fault) -> str:
        """What it started must go with it, before another starts the same."""
        return self._kill(self._pod(fault))

    async def _pod_drained(self, fault: Fault) -> str:
        """As a kubelet ends a pod; the whole group leaves, and comes back."""
        pod = self._pod(fault)
        if pod is None:
            return "nobody"
        pod.terminate()
        return str(pod.pid)

    async def _pod_frozen(self, fault: Fault) -> str:
        """Its ranks and front go on: it has no part in what they do."""
        pod = self._pod(fault)
        return "nobody" if pod is None else await self._freeze(pod, fault.seconds)

    async def _rank_frozen(self, fault: Fault) -> str:
        ranks = self._world.ranks()
        if not ranks:
            return "nobody"
        return await self._freeze(ranks[int(fault.pick * len(ranks))], fault.seconds)

    @staticmethod
    def _kill(process: psutil.Process | None) -> str:
        if process is None:
            return "nobody"
        process.kill()
        return str(process.pid)

    async def _freeze(self, process: psutil.Process, seconds: float) -> str:
        process.suspend()
        self._frozen.append(process)
        await asyncio.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):  # its supervise has ended it
            process.resume()
        return f"{process.pid} for {seconds:.1f} s"

    # --- Redis -----------------------------------------------------------------------------

    def _redis_process(self) -> psutil.Process:
        return psutil.Process(self._world.stack.pids.get("redis", 1 << 30))

    async def _redis_killed(self, fault: Fault) -> str:
        """It keeps nothing on disk, so it comes back empty."""
        return self._kill(self._redis_process())

    async def _redis_frozen(self, fault: Fault) -> str:
        return await self._freeze(self._redis_process(), fault.seconds)

    async def _redis_flushed(self, fault: Fault) -> str:
        async with self._world.redis() as client:
            await client.flushall()
        return "all"

    async def _streams_trimmed(self, fault: Fault) -> str:
        async with self._world.redis() as client:
            for stream in self._world.streams:
                await client.xtrim(stream, maxlen=0, approximate=False)
        return "all"

    # --- gateways --------------------------------------------------------------------------

    async def _gateway_killed(self, fault: Fault) -> str:
        gateway = int(fault.pick * 2)
        life = self._world.life(gateway)
        if life is None:
            return "nobody"
        process = psutil.Process(life.pid)
        journal = self._world.journal
        open_now = [r for r in journal.records if r.life == life and not r.ended]
        journal.dead.add(life)  # before its clients can notice
        process.kill()
        self._watches.append(asyncio.create_task(self._gone([r.uid for r in open_now if r.uid])))
        return f"gateway {gateway} with {len(open_now)} requests open"

    async def _gateway_frozen(self, fault: Fault) -> str:
        """Shorter than its leases last."""
        life = self._world.life(int(fault.pick * 2))
        if life is None:
            return "nobody"
        return await self._freeze(psutil.Process(life.pid), fault.seconds)

    async def _gone(self, uids: list[str]) -> None:
        """The requests of a killed gateway leave the leader: its session was their lease."""
        gateways = {names.uid_gateway(uid) for uid in uids}
        journal = self._world.journal

        async def gone() -> bool:
            ledger = await self._world.ledger(0 if self._world.life(0) else 1)
            if "requests" not in ledger:
                return False
            return not any(names.uid_gateway(r["uid"]) in gateways for r in ledger["requests"])

        bound = journal.began + self._world.plan.seconds + GONE_S - time.monotonic()
        if gateways and not await until(gone, max(GONE_S, bound)):
            journal.wrong(f"requests of the killed gateway {gateways} are still at the leader")
