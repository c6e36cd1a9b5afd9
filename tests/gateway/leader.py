"""A leader's front, scripted: a real WebSocket and HTTP server that speaks the internal API.

It computes nothing. What it does with a request is a ``Plan`` chosen by the test; what it saw is
kept for the test to look at, with events to wait on. A stop ends the request at once, and answers
with the receipts of a group of ``ranks`` ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from stopway_core import names
from stopway_core.signing import StopError, verify

SECRET = "service-secret"
DRAINS = {"status": 503, "message": "this group is draining", "code": "drain", "param": None}
LOST = {"status": 503, "message": "a rank was lost", "code": "rank_lost", "param": None}
STAGES = ("noticed", "stopped", "reclaimed")


@dataclass
class Plan:
    """What the leader does with a request. ``chunks`` None: goes on until it is stopped."""

    chunks: list[str] | None = field(default_factory=lambda: ["Hello", " world"])
    pace_s: float = 0.0
    prepares: bool = False  # its front has it and checks it: no leader does
    accept: bool = True  # say "accepted"
    tokens: bool = True  # after "accepted"; else it stays queued
    refuse: dict[str, Any] | None = None
    reason: str = "eos"
    outcome: str = "finished"
    finish_reason: str = "stop"
    logprobs: bool = False
    end_on_stop: bool = True  # else a stop never gets an answer
    drafted: int = 0  # tokens of each choice that were guessed ahead
    accepted: int = 0
    message: str | None = None


class Job:
    """A request at the leader."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self.uid: str = message["uid"]
        self.sent = [0] * message["n"]
        self.ended: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None


class Leader:
    """One group. ``url`` once started."""

    def __init__(self, group: str = "g0", ranks: int = 2, secret: str = SECRET) -> None:
        self.group = group
        self.ranks = ranks
        self.secret = secret
        self.plan = Plan()
        self.epoch: int | None = 7
        self.policy = "native"
        self.mode = "running"
        self.modes: list[str] = []  # as gateways sent them
        self.word: tuple[str | None, float] = (None, 0.0)  # an admin's newest, and when it came
        self.reminders: list[tuple[str, float]] = []  # of it, as gateways sent them
        self.answer_modes = True
        self.turn = 100
        self.url = ""
        self.jobs: dict[str, Job] = {}
        self.seen: list[str] = []  # every uid that was submitted
        self.stops: dict[str, dict[str, Any]] = {}  # by stop id, as they came first
        self.stop_ways: list[tuple[str, str]] = []  # (stop id, "session" | "post" | "redis")
        self.tombstones: set[str] = set()
        self.answer_stops = True
        self.stage_pause_s = 0.0
        self.hold_stage = ""  # stop short of this status until ``release``
        self.pending_on: list[str] = []
        self.changed = asyncio.Condition()
        self._sockets: set[WebSocket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    # --- server -------------------------------------------------------------------------------

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        app = Starlette(
            routes=[
                WebSocketRoute("/internal/v1/session", self._session),
                Route("/internal/v1/stops", self._post_stops, methods=["POST"]),
                Route("/internal/v1/ledger", self._ledger),
                Route("/internal/v1/trace", self._trace),
            ]
        )
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="critical",
            ws="websockets-sansio",
            timeout_graceful_shutdown=1,  # a gateway may just have connected again
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server._serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://{host}:{self.port}"

    async def stop(self) -> None:
        """Gone, as if killed."""
        await self.break_sessions()
        for task in list(self._tasks):
            task.cancel()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._serving

    async def break_sessions(self) -> None:
        """The leases end: every request on them does, too."""
        for socket in list(self._sockets):
            with contextlib.suppress(RuntimeError):
                await socket.close(1012)
        self._sockets.clear()

    async def wait_for(self, condition: Any, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    @property
    def running(self) -> list[str]:
        return [uid for uid, job in self.jobs.items() if job.ended is None]

    async def send(self, message: dict[str, Any]) -> None:
        for socket in list(self._sockets):
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await socket.send_text(json.dumps(message))

    # --- the session --------------------------------------------------------------------------

    def _denied(self, headers: Any) -> bool:
        return headers.get("authorization") != f"Bearer {self.secret}"

    async def _session(self, socket: WebSocket) -> None:
        if self._denied(socket.headers):
            await socket.close(1008)
            return
        await socket.accept()
        await socket.send_text(json.dumps(self._hello()))
        self._sockets.add(socket)
        await self._note()
        try:
            while True:
                message = json.loads(await socket.receive_text())
                if message["type"] == "submit":
                    await self._submit(message)
                elif message["type"] == "stop":
                    await self.take_stop(message["stop"], "session")
                elif message["type"] == "mode":
                    await self.take_mode(message["mode"], message.get("said_at"))
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            self._sockets.discard(socket)
            for job in list(self.jobs.values()):
                if job.ended is None:
                    self._finish(job, "client_disconnect", "stopped")
            await self._note()

    def _hello(self) -> dict[str, Any]:
        return {
            "type": "hello",
            "group": self.group,
            "epoch": self.epoch,
            "model": "smollm2-135m-instruct",
            "max_model_len": 2048,
            "total_blocks": 100,
            "block_size": 16,
            "ranks": self.ranks,
            "policy": self.policy,
            "numerics": "fast",
            **self._mode_fields(),
        }

    def _mode_fields(self) -> dict[str, Any]:
        wanted, said_at = self.word
        return {"mode": self.mode, "wanted": wanted, "said_at": said_at}

    async def take_mode(self, mode: str, said_at: float | None = None) -> None:
        """An admin's word: ``abort`` ends what runs, any other lets it run."""
        if said_at is None:
            self.modes.append(mode)
            self.word = mode, self.word[1] + 1.0
        else:
            self.reminders.append((mode, said_at))
            if said_at <= self.word[1]:
                return
            self.word = mode, said_at
        await self._note()
        await self.send({"type": "mode", **self._mode_fields()})  # a front has it
        if not self.answer_modes:
            return
        if mode == "abort":
            for uid in self.running:
                await self._end(self.jobs[uid], "admin", "stopped")
        await self.say_mode(mode)

    async def say_mode(self, mode: str) -> None:
        """The mode that is in force, for every gateway."""
        self.mode = mode
        await self.send({"type": "mode", **self._mode_fields()})

    async def say_hello(self, epoch: int) -> None:
        """On sessions that stand: ``epoch`` has formed, or has a link to its front again."""
        self.epoch = epoch
        await self.send(self._hello())

    async def start_anew(self) -> None:
        """Another pod in its place: sessions break, and what was said to it is forgotten."""
        self.mode, self.word = "running", (None, 0.0)
        self.modes.clear()
        await self.break_sessions()

    async def _submit(self, message: dict[str, Any]) -> None:
        job = Job(message)
        self.seen.append(job.uid)
        if self.plan.prepares:
            await self._note()
            return
        self.jobs[job.uid] = job
        refusal = LOST if message["epoch"] != self.epoch else self.plan.refuse
        if job.uid in self.tombstones:
            await self._end(job, "client_cancel", "stopped")
        elif refusal is not None:
            job.ended = {}
            await self.send({"type": "refused", "uid": job.uid, **refusal})
        else:
            job.task = asyncio.create_task(self._work(job, self.plan))
            self._tasks.add(job.task)
            job.task.add_done_callback(self._tasks.discard)
        await self._load()
        await self._note()

    async def _work(self, job: Job, plan: Plan) -> None:
        if not plan.accept:
            return
        await self.send({"type": "accepted", "uid": job.uid, "prompt_tokens": 5})
        await self._note()
        if not plan.tokens:
            return
        count = 0
        while job.ended is None and (plan.chunks is None or count < len(plan.chunks)):
            text = f"t{count} " if plan.chunks is None else plan.chunks[count]
            count += 1
            items = []
            for index in range(job.message["n"]):
                job.sent[index] += 1
                items.append(self._item(job, index, text, plan.logprobs))
            await self.send({"type": "out", "items": items})
            await self._note()
            await asyncio.sleep(plan.pace_s)
        if job.ended is None:
            await self._end(job, plan.reason, plan.outcome, plan.finish_reason)

    def _item(self, job: Job, index: int, text: str, logprobs: bool) -> dict[str, Any]:
        entry = {"token": text, "token_id": 1, "bytes": list(text.encode()), "logprob": -0.5}
        top = {**entry, "token": "other", "logprob": -1.5}
        return {
            "uid": job.uid,
            "index": index,
            "text": text,
            "tokens": 1,
            "logprobs": [{**entry, "top": [entry, top]}] if logprobs else None,
        }

    def _finish(self, job: Job, reason: str, outcome: str) -> None:
        job.ended = {"reason": reason, "outcome": outcome}
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()

    async def _end(self, job: Job, reason: str, outcome: str, finish_reason: str = "abort") -> None:
        self._finish(job, reason, outcome)
        for index in range(job.message["n"]):
            await self.send(
                {
                    "type": "end",
                    "uid": job.uid,
                    "index": index,
                    "outcome": outcome,
                    "reason": reason,
                    "finish_reason": finish_reason,
                    "text": "",
                    "stop_string": None,
                    "prompt_tokens": 5,
                    "completion_tokens": job.sent[index],
                    "cached_tokens": 0,
                    "discarded_tokens": 1 if outcome == "stopped" else 0,
                    "drafted_tokens": self.plan.drafted,
                    "accepted_tokens": self.plan.accepted,
                    "message": self.plan.message,
                }
            )
        await self._load()
        await self._note()

    async def _load(self) -> None:
        running = len(self.running)
        load = {"running": running, "waiting": 0, "free": 100 - running, "held": running}
        await self.send({"type": "load", **load, "cached": 0})

    # --- stops --------------------------------------------------------------------------------

    async def _post_stops(self, request: Request) -> Response:
        if self._denied(request.headers):
            return Response(status_code=401)
        stops = (await request.json())["stops"]
        for stop in stops:
            await self.take_stop(stop, "post")
        return JSONResponse({"accepted": len(stops), "rejected": 0}, 202)

    async def take_stop(self, signed: dict[str, Any], way: str) -> None:
        try:
            stop = verify(signed, {"1": self.secret}, now=time.time())
        except StopError:
            self.stop_ways.append(("bad", way))
            return
        self.stop_ways.append((stop.stop_id, way))
        first = stop.stop_id not in self.stops
        self.stops.setdefault(stop.stop_id, signed)
        await self._note()
        if first and self.answer_stops:
            task = asyncio.create_task(self._answer(signed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _matches(self, signed: dict[str, Any], job: Job) -> bool:
        target, message = signed["target"], job.message
        if not signed["admin"] and message["tenant"] != signed["tenant"]:
            return False
        return bool(
            job.uid in target.get("uids", ())
            or (target.get("conversation") and target["conversation"] == message["conversation"])
            or target.get("tenant") == message["tenant"]
            or target.get("all")
        )

    async def _answer(self, signed: dict[str, Any]) -> None:
        self.turn += 1
        self.tombstones.update(signed["target"].get("uids", ()))
        jobs = [job for job in self.jobs.values() if self._matches(signed, job)]
        live = [job for job in jobs if job.ended is None]
        asked = signed["target"].get("uids")
        outcome = {"finished": 0, "stopped": len(live), "failed": 0}
        for job in jobs:
            if job.ended:
                outcome[job.ended["outcome"]] += 1
        outcome["unknown"] = len(asked) - len(jobs) if asked else 0
        statuses = STAGES if live else ("already_finished",)
        for status in statuses:
            if status == self.hold_stage:
                await self.wait_for(lambda status=status: self.hold_stage != status, 30.0)
            if status in ("stopped",) and self.plan.end_on_stop:
                for job in live:
                    await self._end(job, signed["reason"], "stopped")
            await self.send_receipt(signed, status, jobs, outcome)
            await asyncio.sleep(self.stage_pause_s)

    async def release(self) -> None:
        """Go past ``hold_stage``."""
        self.hold_stage = ""
        await self._note()

    async def send_receipt(
        self, signed: dict[str, Any], status: str, jobs: list[Job], outcome: dict[str, int]
    ) -> None:
        now = time.time()
        reached = STAGES.index(status) if status in STAGES else -1
        ranks = [
            {
                "rank": rank,
                "stage": rank,
                "node": "n",
                "turn_noticed": self.turn,
                "noticed_at": now if reached >= 0 else None,
                "stopped_at": now if reached >= 1 else None,
                "reclaimed_at": now if reached >= 2 else None,
            }
            for rank in range(self.ranks)
        ]
        receipt = {
            "stop_id": signed["stop_id"],
            "group": self.group,
            "epoch": self.epoch,
            "status": status,
            "reason": signed["reason"],
            "tenant": signed["tenant"],
            "trace_id": names.trace_id_of(signed["traceparent"]),
            "outcome": outcome,
            "request_ids": [job.uid for job in jobs],
            "count": max(len(jobs), sum(outcome.values())),
            "turn_effective": self.turn if reached >= 1 or status == "already_finished" else None,
            "tokens_discarded": 1 if reached >= 1 else 0,
            "blocks_reclaimed": 2 if reached >= 2 else 0,
            "blocks_cached": 0,
            "blocks_lent": 0,
            "epoch_ended": False,
            "pending_on": self.pending_on if reached == 1 else [],
            "ranks": ranks,
        }
        await self.send({"type": "receipt", "receipt": receipt})

    # --- the rest -----------------------------------------------------------------------------

    async def _ledger(self, request: Request) -> Response:
        if self._denied(request.headers):
            return Response(status_code=401)
        return JSONResponse({"epoch": self.epoch, "free": 100})

    async def _trace(self, request: Request) -> Response:
        return JSONResponse({"spans": []})
