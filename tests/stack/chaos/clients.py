"""Clients that send one request after another, and hold each answer against what is promised."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx

from stopway_core.types import Reason, Target

from . import prompts
from .journal import Issued, Journal, Record, Told
from .plan import Wanted
from .world import World, until

ANSWER_S = 150.0  # for a whole answer, whatever happens to the stack
GATEWAY_S = 30.0  # for a killed gateway to be there again
KILL_SEEN_S = 5.0
CUT_S = 15.0  # half a second is promised; this machine may be busy loading a model


class Clients:
    """``count`` clients, each of which waits for its answer before it asks again."""

    def __init__(self, world: World, known: list[str]) -> None:
        self._world = world
        self._journal: Journal = world.journal
        self._known = known  # the undisturbed answer of each prompt

    async def run(self, count: int, over: asyncio.Event) -> None:
        """Until it is over; what has begun by then ends as it ends."""
        async with asyncio.TaskGroup() as group:
            for client in range(count):
                group.create_task(self._client(client, over))

    async def _client(self, client: int, over: asyncio.Event) -> None:
        turn = 0
        while not over.is_set():
            wanted = self._world.plan.wanted(client, turn, len(self._known))
            await self._ask(wanted, f"client{client}-{turn}")
            await asyncio.sleep(wanted.pause_s)
            turn += 1

    async def _ask(self, wanted: Wanted, name: str) -> None:
        life = self._world.life(wanted.gateway)
        if life is None or not await self._world.is_up(wanted.gateway):
            back = await until(lambda: self._world.is_up(wanted.gateway), GATEWAY_S)
            life = self._world.life(wanted.gateway)
            if not back or life is None:
                return  # killed again; that it comes back for good is checked at the end
        record = Record(wanted, name, life, time.monotonic())
        self._journal.records.append(record)
        try:
            async with asyncio.timeout(ANSWER_S):
                await (self._stream(record) if wanted.stream else self._whole(record))
        except TimeoutError:
            record.left = True
            if record.canceller not in self._journal.dead:  # else its cancel went with it
                self._journal.wrong(f"{record}: no end within {ANSWER_S:g} s")
        except httpx.TransportError as error:
            record.broken = f"{type(error).__name__}: {error}"
        record.ended = time.monotonic()
        if record.broken:
            await self._check_broken(record)
        elif not record.left:
            self._check_answer(record)
        self._check_texts(record)

    # --- asking ------------------------------------------------------------------------------

    def _request(self, record: Record) -> dict[str, Any]:
        wanted = record.wanted
        body = prompts.body(wanted.prompt, n=wanted.n, max_tokens=wanted.max_tokens)
        body["stream"] = wanted.stream
        if wanted.priority:
            body["priority"] = wanted.priority
        if wanted.conversation:
            body["metadata"] = {"conversation_id": wanted.conversation}
        if wanted.deadlines:
            body["deadlines"] = wanted.deadlines
        headers = {**self._world.headers(wanted.tenant), "x-request-id": record.name}
        return {"url": "/v1/chat/completions", "json": body, "headers": headers}

    async def _stream(self, record: Record) -> None:
        http = self._world.http[record.wanted.gateway]
        wanted = record.wanted
        async with contextlib.AsyncExitStack() as stack:
            response = await stack.enter_async_context(http.stream("POST", **self._request(record)))
            record.status = response.status_code
            record.uid = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                record.error = _error(await response.aread())
                record.done = True
                return
            chunks = 0
            acting = wanted.then != "read"
            if acting and not wanted.chunks and await self._act(record, stack):
                return
            async for line in response.aiter_lines():
                if record.done and line:
                    self._journal.wrong(f"{record}: a line after [DONE]: {line}")
                elif line == "data: [DONE]":
                    record.done = True
                elif line.startswith("data: "):
                    chunks += self._event(record, json.loads(line[6:]))
                    if acting and wanted.chunks and chunks >= wanted.chunks:
                        acting = False
                        if await self._act(record, stack):
                            return

    def _event(self, record: Record, event: dict[str, Any]) -> int:
        """Take one event of a stream; how many chunks of text it had."""
        chunks = 0
        if "error" in event:
            if record.error is not None:
                self._journal.wrong(f"{record}: two errors in one stream")
            record.error = event["error"]
        for choice in event.get("choices", ()):
            index = choice["index"]
            text = choice["delta"].get("content")
            if index in record.ends:
                self._journal.wrong(f"{record}: choice {index} goes on after its end: {choice}")
            if text:
                record.texts[index] = record.texts.get(index, "") + text
                chunks += 1
            if choice.get("finish_reason"):
                record.ends[index] = (choice["finish_reason"], choice.get("stop_reason"))
        return chunks

    async def _act(self, record: Record, stack: contextlib.AsyncExitStack) -> bool:
        """Cancel, or leave (also when nobody takes the cancel); whether nothing more is read."""
        if record.wanted.then == "cancel" and await self._cancel(record):
            return False
        record.left = True
        await stack.aclose()
        return True

    async def _whole(self, record: Record) -> None:
        http = self._world.http[record.wanted.gateway]
        answering = asyncio.create_task(http.post(**self._request(record)))
        try:
            if record.wanted.then != "read":
                await asyncio.wait([answering], timeout=record.wanted.after_s)
                leaves = record.wanted.then == "leave" or not await self._cancel(record)
                if leaves and not answering.done():
                    record.left = True
                    return
            response = await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        record.status = response.status_code
        record.uid = response.headers.get("x-request-id", "")
        record.done = True
        if response.status_code != 200:
            record.error = _error(response.content)
            return
        for choice in response.json()["choices"]:
            record.ends[choice["index"]] = (choice["finish_reason"], choice.get("stop_reason"))
            record.texts[choice["index"]] = choice["message"]["content"] or ""

    async def _cancel(self, record: Record) -> bool:
        """By any gateway: the other one has to find out whose it is. Whether it was accepted."""
        try:
            record.uid = record.uid or await self._uid(record)
            return bool(record.uid) and await self._cancel_at(self._canceller(record), record)
        except httpx.TransportError:
            return False  # a gateway was killed

    @staticmethod
    def _canceller(record: Record) -> int:
        return (record.wanted.gateway + (record.wanted.prompt == 1)) % 2

    async def _uid(self, record: Record) -> str:
        """The id of a request that has no headers yet, by its client's own id."""
        _, body = await self._world.get(record.life.gateway, "/v1/requests", limit=1000)
        return next((r["id"] for r in body["data"] if r["client_request_id"] == record.name), "")

    async def _cancel_at(self, gateway: int, record: Record) -> bool:
        wanted = record.wanted
        life = self._world.life(gateway)
        if life is None:
            return False
        record.cancelled = time.monotonic()
        self._journal.told.append(
            Told(record.cancelled, Reason.CLIENT_CANCEL, uids=(record.uid,), by=wanted.tenant)
        )
        response = await self._world.http[gateway].post(
            f"/v1/requests/{record.uid}/cancel",
            params={"wait": "reclaimed" if wanted.n > 1 else "accepted", "timeout": 5},
            headers=self._world.headers(wanted.tenant),
        )
        if response.status_code in (200, 202):
            stop_id = response.json()["stop_id"]
            self._journal.issued.append(Issued(life, stop_id, f"cancel of {record}"))
            record.canceller = life
            return True
        # Another gateway may find nobody who knows the id: its owner, or the leader, was killed.
        own = gateway == record.life.gateway and self._world.alive(record.life)
        if response.status_code != 404 or own:
            self._journal.wrong(f"{record}: its cancel got {response.status_code}")
        return False

    # --- judging -----------------------------------------------------------------------------

    async def _check_broken(self, record: Record) -> None:
        """A connection breaks only with its gateway; the kill may show a moment later."""

        async def killed() -> bool:
            return record.life in self._journal.dead

        if not await until(killed, KILL_SEEN_S):
            self._journal.wrong(f"{record}: its connection broke: {record.broken}")

    def _check_answer(self, record: Record) -> None:
        wrong = self._journal.wrong
        if not record.done:
            wrong(f"{record}: the stream ended without [DONE]")
        if record.error is not None:
            if {"message", "type", "param", "code"} != set(record.error):
                wrong(f"{record}: an error in no known shape: {record.error}")
            elif record.error["code"] not in list(Reason) and not record.refused:
                wrong(f"{record}: status {record.status}, no reason: {record.error}")
            return
        if set(record.ends) != set(range(record.wanted.n)):
            wrong(f"{record}: ends of choices {sorted(record.ends)}, not of {record.wanted.n}")
        if record.canceller == record.life and record.ended - record.cancelled > CUT_S:
            wrong(f"{record}: ended {record.ended - record.cancelled:.1f} s after its cancel")
        matches = prompts.PROMPTS[record.wanted.prompt].matches
        finishes = ("length", "abort", "stop") if matches else ("length", "abort")
        for index, (finish, stop_reason) in record.ends.items():
            known = stop_reason in list(Reason) if finish == "abort" else stop_reason is None
            if finish not in finishes or not known:
                wrong(f"{record}: ended by {finish}, {stop_reason}")
            text = record.texts.get(index, "")
            if finish == "stop" and matches:
                self._journal.count("whole structured answers")
                if not matches(text):
                    wrong(f"{record}: choice {index} is whole and does not match: {text!r}")

    def _check_texts(self, record: Record) -> None:
        """Every text, whole or cut, is the beginning of what the undisturbed run said."""
        known = self._known[record.wanted.prompt]
        for index, text in record.texts.items():
            size = min(len(known), len(text))
            if text[:size] != known[:size]:
                self._journal.wrong(f"{record}: choice {index} says {text[:200]!r}, not {known!r}")


def _error(content: bytes) -> dict[str, Any]:
    try:
        error: dict[str, Any] = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return {"unreadable": content[:200].decode(errors="replace")}
    return error


def target_told(target: Target, reason: Reason, by: str) -> Told:
    """The note that a stop of ``target`` goes out now."""
    return Told(
        time.monotonic(),
        reason,
        uids=target.uids,
        conversation=target.conversation,
        tenant=target.tenant,
        everything=target.everything,
        by=by,
    )
