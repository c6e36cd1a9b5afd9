"""Real stacks for the tests: the real model, a real Redis, real processes, real HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from stopway_cli.stack.config import StackConfig
from stopway_cli.stack.local import LocalStack
from stopway_core.topology import EngineSettings
from stopway_telemetry import SpanRecord, load_spans

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell a long story about a lighthouse."}]
SOON_S = 30.0  # for what takes a moment, also on a machine that does much else
FAILED = pytest.StashKey[bool]()


@dataclass
class Stream:
    """One streamed answer as far as it was read."""

    response: httpx.Response
    lines: Any
    uid: str
    text: str = ""
    chunks: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    ended: set[int] = field(default_factory=set)

    async def read(self, chunks: int | None = None) -> "Stream":
        """Read ``chunks`` more chunks of text, or to the end."""
        wanted = None if chunks is None else self.chunks + chunks
        async for line in self.lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.done = True
                continue
            event = json.loads(line[6:])
            self.error = event.get("error", self.error)
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {"content": choice.get("text")}
                if delta.get("content"):
                    self.text += delta["content"]
                    self.chunks += 1
                if choice.get("finish_reason"):
                    assert choice["index"] not in self.ended, "two terminal events of one choice"
                    self.ended.add(choice["index"])
                    self.finish_reason = choice["finish_reason"]
                    self.stop_reason = choice.get("stop_reason")
            if wanted is not None and self.chunks >= wanted:
                break
        return self


@dataclass
class Api:
    """What a client of the stack does."""

    stack: LocalStack
    http: httpx.AsyncClient
    body: dict[str, Any] = field(default_factory=dict)

    async def chat(self, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
        """A whole answer; asserts that it is a 200."""
        response = await self.http.post(
            "/v1/chat/completions", json={**self.body, "messages": messages, **body}
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def text(self, messages: list[dict[str, str]], **body: Any) -> str:
        answer = await self.chat(messages, **body)
        return str(answer["choices"][0]["message"]["content"])

    @asynccontextmanager
    async def stream(
        self, messages: list[dict[str, str]] = STORY, **body: Any
    ) -> AsyncIterator[Stream]:
        """A streamed answer; leaving before its end disconnects."""
        wanted = {
            **self.body,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        async with self.http.stream("POST", "/v1/chat/completions", json=wanted) as response:
            if response.status_code != 200:
                await response.aread()
            assert response.status_code == 200, response.text
            yield Stream(response, response.aiter_lines(), response.headers["x-request-id"])

    async def cancel(self, uid: str, wait: str = "reclaimed", timeout: float = 10.0) -> Any:
        response = await self.http.post(
            f"/v1/requests/{uid}/cancel", params={"wait": wait, "timeout": timeout}
        )
        assert response.status_code in (200, 202), response.text
        return response.json()

    async def get(self, path: str) -> Any:
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def blocks(self) -> dict[str, int]:
        """Blocks by state over all groups, from /metrics."""
        text = (await self.http.get("/metrics")).text
        found: dict[str, int] = {"free": 0, "held": 0, "cached": 0}
        for labels, value in re.findall(r"^stopway_kv_blocks\{([^}]*)\} (\S+)", text, re.M):
            state = re.search(r'state="(\w+)"', labels)
            assert state is not None
            found[state[1]] += int(float(value))
        for name in ("running", "waiting"):
            values = re.findall(rf"^stopway_requests_{name}(?:\{{[^}}]*\}})? (\S+)", text, re.M)
            found[name] = sum(int(float(value)) for value in values)
        return found

    async def ledgers(self) -> list[dict[str, Any]]:
        """The leaders' ledgers, checked there and then."""
        found = await self.get("/debug/ledger")
        groups: list[dict[str, Any]] = found["groups"]
        return groups

    async def assert_idle(self) -> None:
        """Within a bound nothing runs, waits or is held. The books balance at every look."""
        seen: list[Any] = []

        async def idle() -> bool:
            now, ledgers = await self.blocks(), await self.ledgers()
            seen[:] = [now, *ledgers]
            if not ledgers or any("blocks" not in ledger for ledger in ledgers):
                return False  # a leader that cannot be asked now
            for ledger in ledgers:
                blocks = ledger["blocks"]
                assert ledger["check"] == "ok", ledger
                assert blocks["free"] + blocks["held"] + blocks["cached"] == blocks["total"], ledger
            # The last step of a request that has ended may still be in flight.
            busy = ("holders", "requests", "in_flight", "running", "waiting")
            held = any(ledger["blocks"]["held"] for ledger in ledgers)
            if held or any(ledger[name] for ledger in ledgers for name in busy):
                return False
            return not (now["held"] or now["running"] or now["waiting"])

        await until(idle, SOON_S, lambda: f"nothing is held, but: {seen}")

    async def spans(self, trace_id: str, names: set[str], count: int) -> list[SpanRecord]:
        """The spans of a trace once ``count`` of those named have been exported."""
        found: list[SpanRecord] = []

        async def there() -> bool:
            found[:] = load_spans(self.stack.spans_dir, trace_id)
            return sum(span.name in names for span in found) >= count

        await until(there, SOON_S, f"{count} spans of {names} in trace {trace_id}")
        return found


async def until(
    condition: Callable[[], Awaitable[bool]], bound_s: float, what: str | Callable[[], str]
) -> None:
    """Wait for ``condition``; fails with ``what`` after ``bound_s``."""
    end = asyncio.get_running_loop().time() + bound_s
    while not await condition():
        if asyncio.get_running_loop().time() > end:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {bound_s} s: {said}")
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Api]:
    """A stack with ``options`` of ``StackConfig`` (or of its settings)."""
    settings = {k: options.pop(k) for k in list(options) if k in SETTINGS}
    config = StackConfig(
        port=0, settings=replace(EngineSettings(drain_s=5.0), **settings), **options
    )
    async with LocalStack(config) as stack:
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with httpx.AsyncClient(
            base_url=stack.url, headers=headers, timeout=300, limits=limits, trust_env=False
        ) as http:
            body = {"model": "smollm2-135m-instruct", "temperature": 0.0, "max_tokens": 64}
            yield Api(stack, http, body)


SETTINGS = set(EngineSettings.__dataclass_fields__)

Running = Callable[..., Any]


@pytest.fixture(scope="session")
def stack_of() -> Running:
    """``async with stack_of(tensor=2) as api`` is a running stack and its client."""
    return running


class Shared:
    """The running stack of a module. One that a test has failed on is not used again."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._stack = AsyncExitStack()
        self._api: Api | None = None

    async def api(self) -> Api:
        if self._api is None:
            self._api = await self._stack.enter_async_context(running(**self._options))
        return self._api

    async def end(self) -> None:
        self._api = None
        await self._stack.aclose()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    """The stack with the options in the module's ``STACK``, from its first use on."""
    made = Shared(request.module.STACK)
    yield made
    await made.end()


@pytest_asyncio.fixture(loop_scope="module")
async def api(shared: Shared, request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """The module's stack. A test that fails takes it along, and no other test with it."""
    yield await shared.api()
    if request.node.stash.get(FAILED, False):
        await shared.end()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture(scope="session")
def prompts() -> dict[str, list[dict[str, str]]]:
    return {"capital": CAPITAL, "story": STORY}
