"""``stopway demo``: Stopway's main job by itself, on this machine, with a real model.

A stream is cancelled midway; another is left. Both must give back all that they held, on every
rank, and say so in a receipt; anything less is a non-zero exit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from stopway_cli import ledger, metrics, render, trace, waterfall
from stopway_cli.client import Api, Server, ending, piece
from stopway_cli.errors import Exit
from stopway_cli.stack import LocalStack, StackConfig
from stopway_cli.up import ProgressLine, until_interrupted
from stopway_cli.waterfall import Span
from stopway_core import names
from stopway_core.topology import EngineSettings

CANCEL_AFTER = 40  # chunks of the answer
LEAVE_AFTER = 20
TOKENS = 1500
_WAIT_S = 10.0
_POLL_S = 0.05
_RANK_SPANS = (names.SPAN_NOTICE, names.SPAN_IN_FLIGHT, names.SPAN_RECLAIM)


class Failure(Exception):
    """Something that the demo promises did not happen."""


def config(tensor: int, pipeline: int, model: str, model_name: str) -> StackConfig:
    """The demo's stack: any free port, nothing kept."""
    settings = EngineSettings(model=model, model_name=model_name, drain_s=2.0)
    return StackConfig(tensor=tensor, pipeline=pipeline, port=0, settings=settings)


async def run(tensor: int, pipeline: int, model: str, model_name: str) -> Exit:
    """The whole demo."""
    out = render.console()
    progress = ProgressLine()
    stack = LocalStack(config(tensor, pipeline, model, model_name), progress)

    async def work() -> Exit:
        async with stack:
            progress.close()
            out.print(f"[bold]stack[/] tensor {tensor} x pipeline {pipeline} at {stack.url}\n")
            async with Api(Server(stack.url, stack.key)) as api:
                acts = asyncio.ensure_future(Demo(api, stack, out, model_name).play())
                watch = asyncio.ensure_future(stack.wait())
                try:
                    await asyncio.wait({acts, watch}, return_when=asyncio.FIRST_COMPLETED)
                    if not acts.done():
                        await watch  # raises what ended the stack
                    return await acts
                finally:
                    for task in (acts, watch):
                        task.cancel()
                    await asyncio.gather(acts, watch, return_exceptions=True)

    try:
        return await until_interrupted(stack, work, lambda: Exit.INTERRUPTED)
    finally:
        progress.close()


class Demo:
    """The acts, in order, against a stack that serves."""

    def __init__(self, api: Api, stack: LocalStack, out: Console, model: str) -> None:
        self.api = api
        self.stack = stack
        self.out = out
        self.model = model
        self.ranks = stack.config.tensor * stack.config.pipeline

    async def play(self) -> Exit:
        """Everything; ``FAILED`` with a sentence when something was not reclaimed."""
        try:
            await self._cancel()
            await self._leave()
            await self._balance()
        except Failure as failure:
            self.out.print(Text.assemble(("not proved: ", "bold red"), str(failure)))
            return Exit.FAILED
        self.out.print("[bold green]everything was reclaimed[/]")
        return Exit.OK

    async def _cancel(self) -> None:
        self._title("1. a stream is cancelled through the API")
        sent = 0.0
        answer: asyncio.Task[Any] | None = None
        end: tuple[str, str] | None = None
        async with self.api.chat(self._body("Tell me a long story of a lighthouse.")) as chunks:
            seen = 0
            async for chunk in chunks:
                self._write(piece(chunk))
                end = ending(chunk) or end
                seen += bool(piece(chunk))
                if seen >= CANCEL_AFTER and answer is None:
                    sent = time.time()
                    cancel = self.api.cancel(str(chunk["id"]), "reclaimed", _WAIT_S)
                    answer = asyncio.create_task(cancel)
        self.out.print("\n")
        if answer is None:
            raise Failure(f"the answer ended by itself ({end}) before it could be cancelled")
        stop = await answer
        if end != ("abort", "client_cancel"):
            raise Failure(f"the stream ended with {end}, not with abort and client_cancel")
        self.out.print("the stream ended: finish_reason [bold]abort[/], stop_reason client_cancel")
        self.out.print(render.receipt(stop, render.accepted_at(stop, sent)))
        self._check(stop)
        await self._waterfall(stop)

    async def _leave(self) -> None:
        self._title("2. a client disconnects in mid-stream")
        uid = ""
        async with self.api.chat(self._body("Tell me a long story of a sailor.")) as chunks:
            seen = 0
            async for chunk in chunks:
                uid = str(chunk["id"])
                self._write(piece(chunk))
                seen += bool(piece(chunk))
                if seen >= LEAVE_AFTER:
                    break
        left = time.time()
        self.out.print("\n\nthe connection is closed; who noticed?")
        request = await self._poll(
            f"/v1/requests/{uid}", lambda found: bool(found.get("stop_ids")), "lists no stop"
        )
        stop_id = str(request["stop_ids"][0])
        stop = await self._poll(
            f"/v1/stops/{stop_id}",
            lambda found: found.get("status") in ("reclaimed", "already_finished"),
            "was not reclaimed",
        )
        self.out.print(render.receipt(stop, render.accepted_at(stop, left)))
        self.out.print()
        self._check(stop)

    async def _balance(self) -> None:
        self._title("3. the books")
        end = time.monotonic() + _WAIT_S
        while True:
            loads = metrics.groups(metrics.parse(await self.api.text("/metrics")))
            busy = [name for name, load in loads.items() if load.running or load.blocks.held]
            if loads and not busy:
                break
            if time.monotonic() > end:
                raise Failure(f"/metrics still shows something running or held: {loads}")
            await asyncio.sleep(_POLL_S)
        ledgers = ledger.by_group(await self.api.get("/debug/ledger"))
        for name, load in loads.items():
            blocks = load.blocks
            total = ledger.total_blocks(ledgers.get(name, {}))
            line = f"{name}: free {blocks.free} + cached {blocks.cached} = {blocks.total}"
            self.out.print(f"{line}, of {total} in the ledger")
            if blocks.total != total:
                raise Failure(f"{name} has {total} blocks and accounts for {blocks.total}")

    # --- pieces ----------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self.out.print(Text(text, style="bold cyan"))

    def _write(self, text: str) -> None:
        self.out.print(Text(text), end="", soft_wrap=True)

    def _body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }

    async def _poll(self, path: str, good: Any, complaint: str) -> Mapping[str, Any]:
        end = time.monotonic() + _WAIT_S
        while True:
            found = await self.api.get(path)
            if good(found):
                return dict(found)
            if time.monotonic() > end:
                raise Failure(f"{path} {complaint} within {_WAIT_S:.0f} s: {found}")
            await asyncio.sleep(_POLL_S)

    def _check(self, stop: Mapping[str, Any]) -> None:
        problem = incomplete(stop, self.ranks)
        if problem:
            raise Failure(problem)

    async def _waterfall(self, stop: Mapping[str, Any]) -> None:
        """Show the stop's spans; they are written by threads of their own, so wait a little."""
        trace_id, stop_id = str(stop.get("trace_id") or ""), str(stop["stop_id"])
        end = time.monotonic() + _WAIT_S
        spans: list[Span] = []
        while time.monotonic() < end:
            everything = trace.local_spans(self.stack.spans_dir, trace_id)
            spans = waterfall.subtree(everything, stop_id)
            if not missing_spans(spans, self.ranks):
                break
            await asyncio.sleep(_POLL_S)
        if spans:
            self.out.print()
            trace.show(spans, trace_id)
        self.out.print()
        missing = missing_spans(spans, self.ranks)
        if missing:
            raise Failure(f"the trace {trace_id} of the stop lacks {', '.join(missing)}")


def incomplete(stop: Mapping[str, Any], ranks: int) -> str:
    """Why a receipt is not whole, or an empty string: every rank of its group, every time."""
    if stop.get("status") != "reclaimed":
        return f"the stop is {stop.get('status')}, pending on {stop.get('pending_on')}"
    groups = stop.get("groups") or []
    if not groups:
        return "no group answered the stop"
    for group in groups:
        parts = group.get("ranks") or []
        if len(parts) != ranks:
            return f"{group.get('group')} has {ranks} ranks, its receipt {len(parts)}"
        for part in parts:
            for key in ("noticed_at", "stopped_at", "reclaimed_at"):
                if not part.get(key):
                    return f"{group.get('group')} rank {part.get('rank')} has no {key}"
    return ""


def missing_spans(spans: list[Span], ranks: int) -> list[str]:
    """The spans that a stop's trace should have and lacks."""
    there = {waterfall.label(span) for span in spans}
    wanted = [names.SPAN_STOP] + [f"{n} [rank {r}]" for n in _RANK_SPANS for r in range(ranks)]
    return [name for name in wanted if name not in there]
