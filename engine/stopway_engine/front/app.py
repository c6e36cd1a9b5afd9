"""The front's HTTP: gateways' sessions, the direct path for stops, and what people look at."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from stopway_core import names
from stopway_core.events import Mode
from stopway_core.signing import StopError, verify
from stopway_engine.front.hub import Hub
from stopway_engine.front.session import Session
from stopway_telemetry import load_spans

BODY_MAX = 4 * 1024 * 1024


class FrontApp:
    """The routes of docs/internal-api.md over one hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._secret = hub.config.secret
        self._tasks: set[asyncio.Task[None]] = set()

    def asgi(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
                Route("/internal/v1/stops", self.stops, methods=["POST"]),
                Route("/internal/v1/ledger", self.ledger),
                Route("/internal/v1/trace", self.trace),
                WebSocketRoute("/internal/v1/session", self.session),
            ]
        )

    def _allowed(self, headers: Any) -> bool:
        given = headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._secret}".encode())

    async def healthz(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def readyz(self, _: Request) -> JSONResponse:
        epoch = self._hub.epoch
        return JSONResponse({"epoch": epoch}, 200 if epoch is not None else 503)

    async def stops(self, request: Request) -> JSONResponse:
        if not self._allowed(request.headers):
            return JSONResponse({"error": "the service's secret is needed"}, 401)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_MAX:
                return JSONResponse({"error": f"more than {BODY_MAX} bytes"}, 413)
        try:
            entries = json.loads(body)["stops"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return JSONResponse({"error": 'a body {"stops": [...]} is needed'}, 400)
        accepted = sum(self._stop(entry) for entry in entries)
        return JSONResponse({"accepted": accepted, "rejected": len(entries) - accepted}, 202)

    def _stop(self, entry: Any) -> bool:
        try:
            stop = verify(entry, {"1": self._secret}, now=time.time())
        except StopError as error:
            print(f"a stop was refused: {error}", file=sys.stderr, flush=True)
            return False
        self._hub.stop(stop, entry)
        return True

    async def ledger(self, request: Request) -> JSONResponse:
        if not self._allowed(request.headers):
            return JSONResponse({"error": "the service's secret is needed"}, 401)
        try:
            return JSONResponse(await self._hub.ledger())
        except TimeoutError:
            return JSONResponse({"error": "the leader does not answer"}, 503)

    async def trace(self, request: Request) -> JSONResponse:
        if not self._allowed(request.headers):
            return JSONResponse({"error": "the service's secret is needed"}, 401)
        spans_dir = self._hub.config.spans_dir
        trace_id = request.query_params.get("trace_id", "")
        spans = load_spans(Path(spans_dir), trace_id) if spans_dir and trace_id else []
        return JSONResponse({"spans": [record.to_json() for record in spans]})

    async def session(self, socket: WebSocket) -> None:
        gateway = socket.query_params.get("gateway", "")
        if not self._allowed(socket.headers) or not names.valid_id(gateway):
            await socket.close(1008)
            return
        await socket.accept()
        session = Session(gateway, socket)
        sender = asyncio.create_task(session.run())
        receiver = asyncio.create_task(self._receive(session, socket))
        self._hub.open(session)
        try:
            await asyncio.wait([sender, receiver], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.closed(session)
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)

    async def _receive(self, session: Session, socket: WebSocket) -> None:
        try:
            while True:
                message = json.loads(await socket.receive_text())
                if message["type"] == "submit":
                    task = asyncio.create_task(self._submit(session, message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif message["type"] == "stop":
                    self._stop(message["stop"])
                elif message["type"] == "mode":
                    self._hub.mode.say(Mode(message["mode"]), _moment(message.get("said_at")))
        except (WebSocketDisconnect, RuntimeError):
            return
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            print(f"gateway {session.gateway} sent nonsense: {error!r}", file=sys.stderr)

    async def _submit(self, session: Session, message: dict[str, Any]) -> None:
        try:
            await self._hub.submit(session, message)
        except Exception as error:  # one request must never take the others along
            print(f"request {message.get('uid')!r} failed in the front: {error!r}", file=sys.stderr)
            session.send(
                {
                    "type": "refused",
                    "uid": message.get("uid"),
                    "status": 500,
                    "message": "the front could not take this request; its log says why",
                    "code": "engine_error",
                    "param": None,
                }
            )


def _moment(value: Any) -> float | None:
    """Unix seconds. Raises ``ValueError`` for what is no time, ``TypeError`` for no number."""
    if value is None:
        return None
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value} is not a time")
    return seconds
