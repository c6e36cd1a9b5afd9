"""Stand-ins: child processes that are not the engine, and a gateway that only says its lines."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stopway_cli.stack import Commands, preflight
from stopway_core.topology import EngineSettings
from stopway_telemetry import SpanRecord, SpanStore

# A pod and a gateway in one: says 200 to everything on the port that it was told, as a gateway
# with all groups.
SERVER = """
import http.server, json, os, pathlib
name = os.environ.get("STOPWAY_POD_NAME") or "gateway"
out = pathlib.Path({directory!r})
(out / f"{{name}}.env.json").write_text(json.dumps(dict(os.environ)))
if os.environ.get("STOPWAY_POD_INDEX", "0") != "0":  # not the leader: it has no front
    import time
    time.sleep(1000)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if groups:
            known = json.loads(pathlib.Path(groups).read_text())["groups"]
            self.wfile.write(json.dumps({{"groups": [group["name"] for group in known]}}).encode())
    def log_message(self, *args):
        pass
groups = os.environ.get("STOPWAY_GROUPS_FILE")
port = os.environ.get("STOPWAY_PORT") or os.environ["STOPWAY_FRONT_PORT"]
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true value of ``condition``. Fails after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout_s} s"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    return alive


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Makes a command line that runs the given Python text."""
    made = iter(range(1000))

    def make(text: str) -> tuple[str, ...]:
        path = tmp_path / f"standin{next(made)}.py"
        path.write_text(textwrap.dedent(text))
        return (sys.executable, "-S", str(path))

    return make


@pytest.fixture
def commands(script: Callable[[str], tuple[str, ...]], tmp_path: Path) -> Commands:
    """Stand-ins for supervise and gateway that write down their environment."""
    server = script(SERVER.format(directory=str(tmp_path)))
    return Commands(supervise=server, gateway=server)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    """Settings for stand-ins: no model is looked for, nothing drains."""
    monkeypatch.setattr(preflight, "check_model", lambda uri: None)
    return EngineSettings(drain_s=0.0)


@dataclass
class FakeGateway:
    """Answers as contracts.md says a gateway does, for a request that never ends by itself."""

    spans_dir: Path
    ranks: int = 2
    ranks_answering: int = 2
    url: str = ""
    key: str = "sk-test"
    trace_id: str = "ab" * 16
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    stops: dict[str, dict[str, Any]] = field(default_factory=dict)
    stop_bodies: list[dict[str, Any]] = field(default_factory=list)  # as they came
    ended: dict[str, str] = field(default_factory=dict)  # uid -> stop id
    numbers: Iterator[int] = field(default_factory=itertools.count)
    held: int = 0
    refuse_extras: bool = False
    modes: dict[str, str] = field(default_factory=lambda: {"g0": "running", "g1": "running"})
    changes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # as they came
    silent: tuple[str, ...] = ()  # groups whose leader does not answer
    speaks_metrics: bool = True

    # --- the parts of the API ----------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if self.refuse_extras and "ignore_eos" in body:
            return self.error(400, "unknown field ignore_eos")
        uid = f"req-{next(self.numbers):x}-fake-0"
        self.running[uid] = asyncio.Event()
        return StreamingResponse(self._stream(uid, body, request), media_type="text/event-stream")

    async def _stream(self, uid: str, body: dict[str, Any], request: Request) -> AsyncIterator[str]:
        stopped = self.running[uid]
        sent, finish = 0, "length"
        try:
            while sent < body["max_tokens"] and not stopped.is_set():
                sent += 1
                yield _event(uid, {"delta": {"content": f"w{sent} "}})
                await asyncio.sleep(0.002)
            if stopped.is_set():
                finish = "abort"
            end = {"delta": {}, "finish_reason": finish}
            yield _event(uid, end | ({"stop_reason": "client_cancel"} if finish == "abort" else {}))
            usage = {"completion_tokens": sent}
            yield "data: " + json.dumps({"id": uid, "choices": [], "usage": usage}) + "\n\n"
            yield "data: [DONE]\n\n"
            self.running.pop(uid, None)
            self.ended.setdefault(uid, "")
        finally:
            if self.running.pop(uid, None) is not None:
                self._stop(uid, "client_disconnect")

    async def cancel(self, request: Request) -> Response:
        uid = request.path_params["uid"]
        if uid in self.running:
            self.running[uid].set()
        elif uid not in self.ended:
            return self.error(404, f"no request {uid}")
        return JSONResponse(self._stop(uid, "client_cancel"))

    async def request(self, request: Request) -> Response:
        uid = request.path_params["uid"]
        if uid not in self.running and uid not in self.ended:
            return self.error(404, f"no request {uid}")
        stops = [self.ended[uid]] if self.ended.get(uid) else []
        return JSONResponse({"id": uid, "stop_ids": stops, "trace_id": self.trace_id})

    async def requests(self, request: Request) -> Response:
        data = [{"id": uid, "status": "running", "tenant": "default"} for uid in self.running]
        return JSONResponse({"object": "list", "data": data})

    async def make_stop(self, request: Request) -> Response:
        self.stop_bodies.append(await request.json())
        return JSONResponse(self._stop("-", "client_cancel"))

    async def stop(self, request: Request) -> Response:
        found = self.stops.get(request.path_params["stop_id"])
        return JSONResponse(found) if found else self.error(404, "no such stop")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake-model"}]})

    async def metrics(self, request: Request) -> Response:
        if not self.speaks_metrics:
            return Response(status_code=404)
        blocks = {"free": 90 - self.held, "held": self.held, "cached": 10}
        lines = [f'stopway_kv_blocks{{group="g0",state="{s}"}} {n}.0' for s, n in blocks.items()]
        lines.append(f'stopway_requests_running{{group="g0"}} {len(self.running)}.0')
        lines.append('stopway_requests_waiting{group="g0"} 0.0')
        return PlainTextResponse("# HELP x y\n" + "\n".join(lines) + "\n")

    async def ledger(self, request: Request) -> Response:
        holders = {"request:1": self.held} if self.held else {}
        cached = {f"cache:{i}": 1 for i in range(10)}
        book = {"epoch": 7, "blocks": {"total": 100}, "holders": holders | cached}
        return JSONResponse({"groups": [{"group": "g0", **book}]})

    async def groups(self, request: Request) -> Response:
        return JSONResponse(self._groups(self.modes))

    async def change_groups(self, request: Request) -> Response:
        what, body = request.path_params["what"], await request.json()
        self.changes.append((what, body))
        named = body.get("groups", list(self.modes))
        for group in named:
            if group not in self.modes:
                return self.error(404, f"no group {group}")
            if group not in self.silent:
                self.modes[group] = {"resume": "running"}.get(what, body.get("mode", what))
        return JSONResponse(self._groups(named), 202 if self.silent else 200)

    def _groups(self, names: Iterable[str]) -> dict[str, Any]:
        blocks = {"free": 90, "held": 0, "cached": 10}
        rest = {"epoch": 7, "running": 1, "waiting": 2, "blocks": blocks}
        answering = [name for name in names if name not in self.silent]
        groups = [{"group": name, "mode": self.modes[name], **rest} for name in answering]
        return {"groups": groups, "pending_on": list(self.silent)}

    @staticmethod
    def error(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message}}, status_code=status)

    def _stop(self, uid: str, reason: str) -> dict[str, Any]:
        stop_id = f"stop-{len(self.stops)}"
        now = time.time()
        ranks = [
            {
                "rank": rank,
                "stage": 0,
                "node": "local",
                "turn_noticed": 12,
                "noticed_at": now + 0.001,
                "stopped_at": now + 0.002,
                "reclaimed_at": now + 0.004,
            }
            for rank in range(self.ranks_answering)
        ]
        group = {"group": "g0", "epoch": 7, "turn_effective": 13, "tokens_discarded": 1}
        self.stops[stop_id] = {
            "stop_id": stop_id,
            "request_ids": [uid],
            "count": 1,
            "reason": reason,
            "status": "reclaimed",
            "outcome": {"stopped": 1},
            "trace_id": self.trace_id,
            "pending_on": [],
            "groups": [{**group, "blocks_reclaimed": 3, "ranks": ranks}],
        }
        self.ended[uid] = stop_id
        self._write_spans(stop_id, now)
        return self.stops[stop_id]

    def _write_spans(self, stop_id: str, now: float) -> None:
        root = f"{len(self.stops):016x}"

        def record(name: str, ident: int, start: float, end: float, **more: Any) -> SpanRecord:
            span = f"{len(self.stops):08x}{ident:08x}"
            parent = more.pop("parent", root)
            return SpanRecord(name, self.trace_id, span, now + start, now + end, parent, more)

        spans = [
            SpanRecord(
                "stop", self.trace_id, root, now, now + 0.004, "", {"stopway.stop.id": stop_id}
            )
        ]
        for rank in range(self.ranks):
            for index, name in enumerate(("stop.notice", "stop.in_flight", "stop.reclaim")):
                start = index * 0.001
                more = {"stopway.rank": rank}
                spans.append(record(name, 1 + rank * 3 + index, start, start + 0.001, **more))
        SpanStore(self.spans_dir, "fake").append(spans)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/requests/{uid}/cancel", self.cancel, methods=["POST"]),
                Route("/v1/requests/{uid}", self.request),
                Route("/v1/requests", self.requests),
                Route("/v1/stops", self.make_stop, methods=["POST"]),
                Route("/v1/stops/{stop_id}", self.stop),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/debug/ledger", self.ledger),
                Route("/v1/groups", self.groups),
                Route("/v1/groups/{what}", self.change_groups, methods=["POST"]),
            ]
        )


def _event(uid: str, choice: dict[str, Any]) -> str:
    return "data: " + json.dumps({"id": uid, "choices": [{"index": 0, **choice}]}) + "\n\n"


@asynccontextmanager
async def _serving(gateway: FakeGateway) -> AsyncIterator[None]:
    config = uvicorn.Config(gateway.app(), port=0, log_level="error", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        gateway.url = f"http://127.0.0.1:{port}"
        yield
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    """A fake gateway that is served from a thread of its own."""
    fake = FakeGateway(tmp_path / "spans")
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with _serving(fake):
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield fake
    done.set()
    thread.join(30)
