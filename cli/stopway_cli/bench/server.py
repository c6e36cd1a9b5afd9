"""Measuring one OpenAI-compatible server from outside, as its clients see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from stopway_cli import client, metrics
from stopway_cli.bench.figures import percentile, spread
from stopway_cli.errors import CliError, Exit

RUNNING = {
    "stopway": "stopway_requests_running",
    "vllm": "vllm:num_requests_running",
    "llamacpp": "llamacpp:requests_processing",
}
LOADS = ((1, 96), (8, 64), (32, 48))  # (streams, tokens each)
PREFILL_WORDS = 880  # about 3,500 tokens
PREFILL_LEAVE_S = 0.25
SETTLE_S = 0.3
DECODING = 4
_BUSY_LIMIT_S = 20.0
_IDLE_LIMIT_S = 60.0
_POLL_S = 0.003
_STORY = "Write a very long detailed story about a dragon, a lighthouse and sailor number {}."


@dataclass(slots=True)
class Stream:
    """What one streamed answer was like."""

    tokens: int = 0
    computed_tokens: int = 0  # of the prompt: those that no cache had
    first_token_s: float | None = None


@dataclass(slots=True)
class Subject:
    """One server under measurement."""

    url: str
    key: str = ""
    model: str = ""
    kind: str = ""  # of RUNNING; empty when its metrics say nothing
    extras: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of its own: closing a stream of it closes that connection."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=300.0, limits=limits, trust_env=False
        ) as http:
            yield http


def body(subject: Subject, prompt: str, tokens: int) -> dict[str, Any]:
    """A streamed request for exactly ``tokens`` tokens, where the server can be told so."""
    return {
        "model": subject.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.8,
        "stream": True,
        "stream_options": {"include_usage": True},
        **subject.extras,
    }


def count(stream: Stream, chunk: dict[str, Any], now_s: float) -> None:
    """Take a chunk into account: one token unless the usage says more."""
    if client.piece(chunk):
        stream.tokens += 1
        if stream.first_token_s is None:
            stream.first_token_s = now_s
    usage = chunk.get("usage") or {}
    stream.tokens = max(stream.tokens, int(usage.get("completion_tokens") or 0))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if usage:
        stream.computed_tokens = int(usage.get("prompt_tokens") or 0) - int(cached)


async def ask(http: httpx.AsyncClient, subject: Subject, prompt: str, tokens: int) -> Stream:
    """One answer, read to its end. Raises ``CliError`` when the server refuses."""
    stream = Stream()
    begun = time.perf_counter()
    request = http.stream("POST", "/v1/chat/completions", json=body(subject, prompt, tokens))
    async with request as response:
        if response.status_code != 200:
            await response.aread()
            raise client.refusal(response)
        async for chunk in client.chunks(response):
            count(stream, chunk, time.perf_counter() - begun)
    return stream


def story(subject: Subject, number: int, tokens: int) -> dict[str, Any]:
    """The body of a request for a long answer; no two numbers share more than its template."""
    return body(subject, _STORY.format(number), tokens)


async def running(http: httpx.AsyncClient, kind: str) -> float | None:
    """How many requests run, as the server's metrics say."""
    response = await http.get("/metrics")
    return metrics.total(metrics.parse(response.text), RUNNING[kind])


async def examine(subject: Subject) -> None:
    """Find out model and kind, and warm it up. Raises ``CliError`` when it does not serve."""
    try:
        async with subject.http() as http:
            if not subject.model:
                subject.model = await _first_model(http)
            subject.kind = await _kind(http)
            try:
                await ask(http, subject, "Say hello.", 8)
            except CliError:
                subject.extras = {}  # it may know no ignore_eos
                await ask(http, subject, "Say hello.", 8)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise CliError(
            f"{subject.url} does not answer ({type(error).__name__}); check the URL", Exit.SERVER
        ) from None


async def _first_model(http: httpx.AsyncClient) -> str:
    response = await http.get("/v1/models")
    if response.status_code != 200:
        raise client.refusal(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise CliError("the server lists no model; name one with --model", Exit.SERVER) from None


async def _kind(http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("/metrics")
    except httpx.TransportError:
        return ""
    names = {sample.name for sample in metrics.parse(response.text)}
    return next((kind for kind, name in RUNNING.items() if name in names), "")


async def throughput(subject: Subject, streams: int, tokens: int, seed: int) -> dict[str, float]:
    """Tokens per second of ``streams`` at once, and the median time to the first token."""
    return rates(*await answers_of(subject, streams, tokens, seed))


async def answers_of(
    subject: Subject, streams: int, tokens: int, seed: int
) -> tuple[list[Stream], float]:
    """``streams`` answers at once, and the seconds that they took together."""
    async with subject.http() as http:
        begun = time.perf_counter()
        answers = await asyncio.gather(
            *(ask(http, subject, _STORY.format(seed + i), tokens) for i in range(streams))
        )
        return answers, time.perf_counter() - begun


def rates(answers: list[Stream], took: float) -> dict[str, float]:
    """The figures of ``answers``."""
    firsts = [a.first_token_s for a in answers if a.first_token_s is not None]
    figures = {"tokens_per_s": round(sum(a.tokens for a in answers) / took, 1)}
    if firsts:
        figures["first_token_ms"] = round(percentile(firsts, 0.5) * 1000, 1)
    return figures


async def probe_ms(http: httpx.AsyncClient, subject: Subject, number: int) -> float:
    """Milliseconds until a short request is answered with one token."""
    begun = time.perf_counter()
    await ask(http, subject, f"Say hi {number}.", 1)
    return (time.perf_counter() - begun) * 1000


async def idle_probe_ms(subject: Subject, repeats: int, seed: int) -> float:
    """The median probe of an idle server."""
    async with subject.http() as http:
        return percentile([await probe_ms(http, subject, seed + i) for i in range(repeats)], 0.5)


async def disconnect(subject: Subject, repeats: int, seed: int) -> dict[str, Any]:
    """Streams that decode leave: milliseconds until nothing runs.

    Without metrics it is the time until a probe is answered, less that on an idle server.
    """
    idle_ms = 0.0 if subject.kind else await idle_probe_ms(subject, repeats, seed)
    found = []
    async with subject.http() as watcher:
        for repeat in range(repeats):
            async with subject.http() as http, AsyncExitStack() as opened:
                streams = []  # kept: a dropped generator would be closed behind our back
                for i in range(DECODING):
                    wanted = story(subject, seed + repeat * DECODING + i, 1500)
                    response = await opened.enter_async_context(
                        http.stream("POST", "/v1/chat/completions", json=wanted)
                    )
                    streams.append(client.chunks(response))
                    await anext(streams[-1])
                if subject.kind:
                    await _until(watcher, subject.kind, DECODING)
                await asyncio.sleep(SETTLE_S)
                begun = time.perf_counter()
            if subject.kind:
                await _until(watcher, subject.kind, 0)
                found.append((time.perf_counter() - begun) * 1000)
            else:
                found.append(max(0.0, await probe_ms(watcher, subject, repeat) - idle_ms))
    return {"method": "metrics" if subject.kind else "probe", "ms": spread(found).to_json()}


async def _until(http: httpx.AsyncClient, kind: str, wanted: int) -> None:
    """Wait until ``wanted`` requests run (0: for an idle server, any more: at least that many)."""
    limit_s = _BUSY_LIMIT_S if wanted else _IDLE_LIMIT_S
    end = time.perf_counter() + limit_s
    while True:
        now = await running(http, kind)
        if now is not None and (now >= wanted if wanted else now == 0):
            return
        if time.perf_counter() > end:
            raise CliError(
                f"after {limit_s:.0f} s {now} requests run where {wanted} should; is the server "
                "used by somebody else?",
                Exit.FAILED,
            )
        await asyncio.sleep(_POLL_S)


def long_prompt(seed: int, words: int = PREFILL_WORDS) -> str:
    """About four tokens a word that no prefix cache has seen under another ``seed``."""
    return f"{seed} " + " ".join(f"word{(i * 7919 + seed) % 997}" for i in range(words))


async def prefill(subject: Subject, repeats: int, seed: int) -> dict[str, Any]:
    """A client leaves 0.25 s into a long prefill: what a probe then waits, and on idle."""
    after = []
    async with subject.http() as http:
        for repeat in range(repeats):
            asked = asyncio.create_task(ask(http, subject, long_prompt(seed + repeat), 8))
            done, _ = await asyncio.wait({asked}, timeout=PREFILL_LEAVE_S)
            if done:
                asked.result()  # a refusal, or a server that is faster than that
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            after.append(await probe_ms(http, subject, seed + repeat))
            await asyncio.sleep(SETTLE_S)
        begun = time.perf_counter()
        await ask(http, subject, long_prompt(seed + 500), 1)
        full_ms = (time.perf_counter() - begun) * 1000
    idle = await idle_probe_ms(subject, repeats, seed + 100)
    return {
        "probe_ms": spread(after).to_json(),
        "idle_probe_ms": round(idle, 1),
        "whole_prefill_ms": round(full_ms, 1),
    }


async def cancel(subject: Subject, repeats: int, seed: int) -> dict[str, Any]:
    """Stopway only: a stream is cancelled by the API; milliseconds until its receipt is whole."""
    found = []
    async with client.Api(client.Server(subject.url, subject.key)) as api:
        for repeat in range(repeats):
            async with api.chat(story(subject, seed + repeat, 1500)) as chunks:
                first = await anext(chunks)
                begun = time.perf_counter()
                await api.cancel(str(first["id"]), "reclaimed")
                found.append((time.perf_counter() - begun) * 1000)
    return {"ms": spread(found).to_json()}
