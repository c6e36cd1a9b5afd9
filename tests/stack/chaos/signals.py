"""Stops that no client of a request sends, and stops that come again, late or early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import websockets
from redis.exceptions import RedisError

from stopway_core import signing
from stopway_core.types import Reason, Stop, Target

from . import prompts
from .clients import target_told
from .journal import Issued, Journal
from .plan import MODES, Signal
from .world import World, until

KEEP_MAX = 200
LATE_S = 8.0
EARLY_S = 6.0
CONFIRM_S = 3.0  # for a leader to say that a mode is so
PEACE_S = 30.0  # for one that must say so
RESUMED_S = 120.0  # a loaded machine takes long to load a model
HELD = "early stops that held"


class Signals:
    """Sends the signals of a plan, one after another."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._journal: Journal = world.journal
        # Entries of the stop streams as they were: (seen at, stream, text).
        self._seen: deque[tuple[float, str, str]] = deque(maxlen=KEEP_MAX)
        self._cursors = dict.fromkeys(world.streams[:2], "0-0")

    async def run(self, senders: int, over: asyncio.Event) -> None:
        """Each sender one after another, until it is over."""
        async with asyncio.TaskGroup() as group:
            for sender in range(senders):
                group.create_task(self._send(sender, over))

    async def _send(self, sender: int, over: asyncio.Event) -> None:
        ways = {
            "conversation": self._by_api,
            "tenant": self._by_api,
            "all": self._by_api,
            "skewed": self._skewed,
            "early": self._early,
            "mode": self._mode,
        }
        turn = 0
        while not over.is_set():
            signal = self._world.plan.signal(sender, turn)
            turn += 1
            try:
                await self._collect()
                await ways.get(signal.kind, self._again)(signal)
                self._journal.count(f"signal {signal.kind}")
            except (RedisError, OSError, httpx.TransportError):
                self._journal.count(f"signal {signal.kind}: nobody there")
            await asyncio.sleep(signal.pause_s)

    async def in_peace(self) -> None:
        """When all has healed, each mode is taken at once, and a stop before its request holds."""
        for mode in MODES:
            before = self._journal.counts[f"mode {mode}"]
            signal = replace(self._world.plan.signal(0, 0), mode=mode, paused_s=0.2)
            await self._mode(signal, confirm_s=PEACE_S)
            if self._journal.counts[f"mode {mode}"] == before:
                self._journal.wrong(f"the group was not paused in peace: {mode}")
        for skew_s in (-1.0, 1.0):
            before = self._journal.counts[HELD]
            await self._early(
                replace(self._world.plan.signal(0, 0), skew_s=skew_s), bound_s=PEACE_S
            )
            if self._journal.counts[HELD] == before:
                self._journal.wrong(f"a stop before its request, {skew_s:+g} s off, did not hold")

    # --- by the API --------------------------------------------------------------------------

    async def _by_api(self, signal: Signal) -> None:
        life = self._world.life(signal.gateway)
        if life is None:
            return
        target, reason = {
            "conversation": ({"conversation": signal.conversation}, Reason.CLIENT_CANCEL),
            "tenant": ({"tenant": signal.tenant}, Reason.ADMIN),
            "all": ({"all": True}, Reason.ADMIN),
        }[signal.kind]
        told = target_told(signing.target_from_json(target), reason, "")
        self._journal.told.append(told)
        response = await self._world.http[signal.gateway].post(
            "/v1/stops",
            json={**target, "wait": signal.wait, "timeout": 5},
            headers=self._world.headers(),
        )
        if response.status_code not in (200, 202):
            self._journal.wrong(f"a stop of {target} got {response.status_code}: {response.text}")
            return
        self._journal.issued.append(Issued(life, response.json()["stop_id"], f"a stop of {target}"))

    # --- modes -------------------------------------------------------------------------------

    async def _mode(self, signal: Signal, confirm_s: float = CONFIRM_S) -> None:
        """Pause the group, and resume it by the other gateway: it must not matter who paused it."""
        if self._world.life(signal.gateway) is None:
            return
        if signal.mode == "abort":
            self._tell_abort()
        status = await self._change(
            signal.gateway, "pause", {"mode": signal.mode, "timeout": confirm_s}
        )
        if status == 200:
            self._journal.count(f"mode {signal.mode}")
        await asyncio.sleep(signal.paused_s)
        if signal.mode == "abort":
            self._tell_abort()  # an epoch that began meanwhile was told again

        async def resumed() -> bool:
            for gateway in (1 - signal.gateway, signal.gateway):
                if await self._change(gateway, "resume", {"timeout": CONFIRM_S}) == 200:
                    return True
            return False

        if not await until(resumed, RESUMED_S):
            self._journal.wrong(f"the group was not resumed within {RESUMED_S:g} s")

    def _tell_abort(self) -> None:
        self._journal.told.append(target_told(Target(everything=True), Reason.ADMIN, ""))

    async def _change(self, gateway: int, what: str, body: dict[str, Any]) -> int:
        """The status of a change of mode; 0 when the gateway is not there."""
        try:
            response = await self._world.http[gateway].post(
                f"/v1/groups/{what}", json=body, headers=self._world.headers()
            )
        except httpx.TransportError:
            return 0
        # 202: its leader has not said so; 503: a gateway that has just begun knows no group.
        if response.status_code not in (200, 202, 503):
            self._journal.wrong(f"{what} {body} got {response.status_code}: {response.text}")
        return response.status_code

    # --- by the streams ----------------------------------------------------------------------

    async def _collect(self) -> None:
        """Keep copies of what is in the stop streams."""
        async with self._world.redis() as client:
            for stream in self._cursors:
                entries = await client.xrange(stream, f"({self._cursors[stream]}", count=KEEP_MAX)
                for entry_id, fields in entries:
                    self._cursors[stream] = entry_id
                    if "again" not in fields:
                        self._seen.append((time.monotonic(), stream, fields["stop"]))

    async def _again(self, signal: Signal) -> None:
        """Add kept entries once more, with the signatures that they have."""
        now = time.monotonic()
        late = [entry for entry in self._seen if now - entry[0] > LATE_S]
        recent = list(self._seen)[-8:]
        chosen = {"duplicate": recent[-3:], "reorder": recent, "late": late[-4:]}[signal.kind]
        if signal.kind != "duplicate":
            Random(signal.shuffle).shuffle(chosen)
        async with self._world.redis() as client:
            for _, stream, text in chosen:
                stop = json.loads(text)
                target = signing.target_from_json(stop["target"])
                by = "" if stop["admin"] else stop["tenant"]
                self._journal.told.append(target_told(target, Reason(stop["reason"]), by))
                await client.xadd(stream, {"stop": text, "again": "1"})

    async def _skewed(self, signal: Signal) -> None:
        """A stop of a live request by somebody whose clock is a second off."""
        live = [r for r in self._journal.records if r.uid and not r.ended]
        if not live:
            return
        record = Random(signal.shuffle).choice(live)
        stop = self._stop(record.uid, signal, f"x{secrets.token_hex(4)}", record.wanted.tenant)
        self._journal.told.append(target_told(stop.target, stop.reason, stop.tenant))
        async with self._world.redis() as client:
            await client.xadd(self._world.stops_stream, {"stop": self._signed(stop), "again": "1"})

    def _stop(self, uid: str, signal: Signal, publisher: str, tenant: str) -> Stop:
        return Stop(
            stop_id=f"stop-{secrets.token_hex(6)}",
            target=Target(uids=(uid,)),
            reason=Reason.CLIENT_CANCEL,
            tenant=tenant,
            admin=False,
            issued_at=time.time() + signal.skew_s,
            publisher=publisher,
            sequence=1,
        )

    def _signed(self, stop: Stop) -> str:
        return json.dumps(signing.sign(stop, self._world.stack.secret))

    # --- before its request ------------------------------------------------------------------

    async def _early(self, signal: Signal, bound_s: float = EARLY_S) -> None:
        """As a gateway: a stop, twice, and its request when the leader knows of the stop."""
        gateway = f"early{secrets.token_hex(4)}"
        (front,) = self._world.stack.front_urls.values()
        uid = f"req-1-{gateway}-{secrets.token_hex(4)}"
        stop = self._stop(uid, signal, gateway, signal.tenant)
        with contextlib.suppress(RedisError, OSError):
            async with self._world.redis() as client:
                entry = {"stop": self._signed(stop), "again": "1"}
                await client.xadd(self._world.stops_stream, entry)
        try:
            async with asyncio.timeout(bound_s), self._session(front, gateway) as socket:
                await self._stopped_before(socket, stop)
                self._journal.count(HELD)
        except (TimeoutError, websockets.WebSocketException, OSError, _EpochOver) as error:
            self._journal.count(f"early stops without a group: {error or type(error).__name__}")

    def _session(self, front: str, gateway: str) -> websockets.connect:
        return websockets.connect(
            front.replace("http", "ws") + f"/internal/v1/session?gateway={gateway}",
            additional_headers={"Authorization": f"Bearer {self._world.stack.secret}"},
            proxy=None,
        )

    async def _stopped_before(self, socket: Any, stop: Stop) -> None:
        """Raises ``_EpochOver`` when the leader that knew of the stop is gone."""
        (uid,) = stop.target.uids
        hello = await _next(socket)
        await socket.send(json.dumps({"type": "stop", "stop": json.loads(self._signed(stop))}))
        while (await _next(socket)).get("receipt", {}).get("stop_id") != stop.stop_id:
            pass
        await socket.send(json.dumps(_submit(uid, stop.tenant, hello["epoch"])))
        while True:
            message = await _next(socket)
            if message["type"] == "out":
                self._journal.wrong(f"{uid}: text of a request that was stopped before it came")
            if message["type"] == "refused" and message["uid"] == uid:
                raise _EpochOver(f"refused, {message['code']}")
            if message["type"] == "end" and message["uid"] == uid:
                break
        if message["reason"] == Reason.RANK_LOST:
            raise _EpochOver("rank_lost")
        if (message["reason"], message["completion_tokens"]) != (Reason.CLIENT_CANCEL, 0):
            self._journal.wrong(f"{uid}, stopped before it came, ended by {message}")


class _EpochOver(Exception):
    """The leader that was talked to is gone, and what it knew with it."""


async def _next(socket: Any) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await socket.recv())
    if message["type"] in ("epoch", "hello") and message.get("epoch") is None:
        raise _EpochOver("no epoch")
    return message


def _submit(uid: str, tenant: str, epoch: int) -> dict[str, Any]:
    return {
        "type": "submit",
        "uid": uid,
        "attempt": 1,
        "epoch": epoch,
        "tenant": tenant,
        "n": 1,
        "prompt": {"messages": prompts.PROMPTS[0].messages},
        "params": {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0},
        "minted_at": time.time(),
    }
