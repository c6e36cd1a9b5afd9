"""Talking to a gateway: its OpenAI API and Stopway's own."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from stopway_cli.errors import CliError, Exit

Chunk = dict[str, Any]  # of a streamed completion, as the API has it


@dataclass(frozen=True, slots=True)
class Server:
    """Where a gateway is, and the key to use there."""

    url: str
    key: str = ""


def find_server(url: str, key: str) -> Server:
    """The server that options or environment name, else this user's running local stack."""
    from stopway_cli.stack import state

    if url:
        return Server(url.rstrip("/"), key)
    info = state.running()
    if info is None:
        raise CliError(
            "no local stack is running; start one with `stopway up`, or say where the server is "
            "with --url and --key (or STOPWAY_URL and STOPWAY_KEY)",
            Exit.SERVER,
        )
    return Server(info.url, key or info.key)


class Api:
    """Calls of one server. Raises ``CliError`` when it is not there or says no."""

    def __init__(self, server: Server, timeout_s: float = 60.0) -> None:
        self.server = server
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        self.http = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=timeout_s, trust_env=False
        )

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> Any:
        return self._json(await self._send("GET", path))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._json(await self._send("POST", path, json=body))

    async def find(self, path: str) -> Any:
        """Like ``get``, but None when the server knows no such thing."""
        response = await self._send("GET", path)
        return None if response.status_code == 404 else self._json(response)

    async def text(self, path: str) -> str:
        response = await self._send("GET", path)
        if response.status_code != 200:
            raise refusal(response)
        return response.text

    async def cancel(self, request_id: str, wait: str, timeout_s: float = 10.0) -> Any:
        """Stop a request and wait for a status of it; the stop's JSON."""
        path = f"/v1/requests/{request_id}/cancel"
        params: dict[str, str | float] = {"wait": wait, "timeout": timeout_s}
        return self._json(await self._send("POST", path, params=params))

    @asynccontextmanager
    async def chat(self, body: dict[str, Any]) -> AsyncIterator[AsyncGenerator[Chunk, None]]:
        """Stream a chat completion: its chunks as JSON. Leaving early disconnects."""
        request = self.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True})
        try:
            async with request as response:
                if response.status_code != 200:
                    await response.aread()
                    raise refusal(response)
                stream = chunks(response)
                try:
                    yield stream
                finally:
                    await stream.aclose()
        except httpx.TransportError as error:
            raise self._gone(error) from None

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self.http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._gone(error) from None

    def _json(self, response: httpx.Response) -> Any:
        if response.status_code not in (200, 202):
            raise refusal(response)
        try:
            return response.json()
        except ValueError:
            raise CliError(
                f"{self.server.url} does not answer like a Stopway gateway; check --url",
                Exit.SERVER,
            ) from None

    def _gone(self, error: Exception) -> CliError:
        kind = type(error).__name__
        return CliError(
            f"{self.server.url} does not answer ({kind}); check --url, or start a stack with "
            "`stopway up`",
            Exit.SERVER,
        )


async def chunks(response: httpx.Response) -> AsyncGenerator[Chunk, None]:
    """The JSON of each event of a stream, up to its end. Raises ``CliError`` for an error event."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":  # read on to the end of the response: leaving early disconnects
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            message = chunk["error"].get("message", "unknown")
            raise CliError(f"the stream failed: {message}", Exit.SERVER)
        yield chunk


def refusal(response: httpx.Response) -> CliError:
    """What a response that is no success tells the user."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    hint = "; pass a valid --key" if response.status_code in (401, 403) else ""
    return CliError(f"the server says {response.status_code}: {message}{hint}", Exit.SERVER)


def piece(chunk: Chunk) -> str:
    """The text that a chat chunk adds."""
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def ending(chunk: Chunk) -> tuple[str, str] | None:
    """(finish reason, stop reason) of the chunk that ends a choice, else None."""
    choices = chunk.get("choices") or [{}]
    reason = choices[0].get("finish_reason")
    return None if reason is None else (reason, str(choices[0].get("stop_reason") or ""))
