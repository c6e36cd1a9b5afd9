"""What no Kubernetes object says: the epoch of a group, and the groups that a gateway has found.

Both are answers of ``/readyz``. A pod that cannot be reached (a policy, an operator outside of the
pods' network) is unknown, which holds up nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import aiohttp

from stopway_core.topology import FRONT_PORT, GATEWAY_PORT
from stopway_operator import objects
from stopway_operator.objects import Obj
from stopway_operator.observed import pod_index, pod_ready

TIMEOUT_S = 1.0
AGE_S = 1.5
UNREACHABLE_S = 30.0  # an operator outside of the pods' network must not wait at each look
TRIES = 3


class Prober:
    """Asks pods; an answer is good for ``AGE_S``, silence after some tries for longer."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._answers: dict[str, tuple[float, Obj | None]] = {}
        self._failures: dict[str, int] = {}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def epochs(self, pods: Iterable[Obj], now: float) -> dict[str, int | None]:
        """By the UID of a leader that is ready: its epoch, None when it has none."""
        leaders = [
            pod
            for pod in pods
            if objects.label(pod, objects.LABEL_COMPONENT) == objects.ENGINE
            and pod_index(pod) == 0
            and pod_ready(pod)
        ]
        answers = await self._ask(leaders, FRONT_PORT, now)
        return {
            uid: answer["epoch"]
            for uid, answer in answers.items()
            if isinstance(answer.get("epoch"), int) or answer.get("epoch", 0) is None
        }

    async def gateways(self, pods: Iterable[Obj], now: float) -> dict[str, Sequence[str]]:
        """By the UID of a gateway that is ready: the groups that it can send to."""
        mine = [
            pod
            for pod in pods
            if objects.label(pod, objects.LABEL_COMPONENT) == objects.GATEWAY and pod_ready(pod)
        ]
        answers = await self._ask(mine, GATEWAY_PORT, now)
        return {
            uid: answer["groups"]
            for uid, answer in answers.items()
            if isinstance(answer.get("groups"), list)
        }

    async def _ask(self, pods: Sequence[Obj], port: int, now: float) -> dict[str, Obj]:
        async def one(pod: Obj) -> None:
            uid = objects.uid_of(pod)
            at, _ = self._answers.get(uid, (0.0, None))
            silent = self._failures.get(uid, 0) >= TRIES
            if now - at < (UNREACHABLE_S if silent else AGE_S):
                return
            answer = await self._get(pod, port)
            self._answers[uid] = (now, answer)
            self._failures[uid] = 0 if answer is not None else self._failures.get(uid, 0) + 1

        await asyncio.gather(*(one(pod) for pod in pods))
        if len(self._answers) > 20_000:
            self._answers.clear()
            self._failures.clear()
        found = {}
        for pod in pods:
            uid = objects.uid_of(pod)
            answer = self._answers.get(uid, (0.0, None))[1]
            if answer is not None:
                found[uid] = answer
        return found

    async def _get(self, pod: Obj, port: int) -> Obj | None:
        address = str((pod.get("status") or {}).get("podIP", ""))
        if not address:
            return None
        host = f"[{address}]" if ":" in address else address
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        try:
            async with self._session.get(f"http://{host}:{port}/readyz") as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None
