"""The simulation beside the real engine: the same small workload, with the engine's step times.

The step times are what the leader's exec thread took, while the rest of the stack was running, so
they contain what the processes of one machine take from each other. The way of a stop to the leader
is taken from cancels of another run than the one that is compared.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from stopway_cli import client
from stopway_cli.bench import server
from stopway_cli.bench.figures import percentile
from stopway_cli.errors import CliError, Exit
from stopway_sim.fleet import CostModel, Figure, SmallRun, beside, calibrate

STREAMS, TOKENS = 8, 64
CANCELLED, CANCEL_AFTER = 4, 16
PROMPTS, PROMPT_WORDS = 3, (4, 12, 28, 60)  # up to about 240 tokens
PROMPT_ANSWER = 8  # tokens
LONG_PROMPTS = 2  # of six full chunks each, by default; those of one are too few for a slope
STAGES = ("noticed", "stopped", "reclaimed")


@dataclass(frozen=True, slots=True)
class Simulated:
    """Figures by workload, measured and simulated; and the model that was calibrated for that."""

    cost: CostModel
    figures: dict[str, list[Figure]]


async def measure(subject: server.Subject, seed: int, tensor: int, pipeline: int) -> Simulated:
    """A stack beside its simulation. Raises ``CliError`` without an admin's key."""
    before = (await _ledger(subject))["step"]
    await _prompts(subject, seed + 200)
    answers, took = await server.answers_of(subject, STREAMS, TOKENS, seed)
    # The prompts share a template, which the cache has; in the simulation they share nothing.
    prompt = round(sum(answer.computed_tokens for answer in answers) / STREAMS)
    load = SmallRun(STREAMS, prompt, TOKENS)
    told = await _cancels(subject, seed + 100)
    stops = await _cancels(subject, seed + STREAMS)
    cancels = SmallRun(CANCELLED, prompt, 1500, CANCEL_AFTER)
    ledger = await _ledger(subject)
    cost = cost_model(ledger, before, tensor, pipeline, told.pop("noticed_ms") / 1000)
    del stops["noticed_ms"]
    figures = {
        f"{STREAMS} streams of {TOKENS} tokens": beside(load, cost, server.rates(answers, took)),
        f"{CANCELLED} cancelled after {CANCEL_AFTER} tokens": beside(cancels, cost, stops),
    }
    return Simulated(cost, figures)


def cost_model(
    ledger: dict[str, Any], before: int, tensor: int, pipeline: int, notify_s: float
) -> CostModel:
    """What a leader's latest steps say, of the measured workloads: those behind step ``before``.

    What else ran before them need not be like them. Raises ``CliError`` when they are too few or
    all alike.
    """
    steps = [
        # A stage's time; the model wants that of all its stages.
        {
            "decode": rows,
            "prefill": tokens,
            "context": context,
            "pairs": pairs,
            "seconds": seconds * pipeline,
        }
        for step, rows, tokens, context, pairs, seconds in ledger["step_times"]
        if step > before
    ]
    blocks = ledger["blocks"]
    shape = {
        "tensor": tensor,
        "pipeline": pipeline,
        "window": max(2, pipeline),
        "blocks": blocks["total"],
        "max_batch_tokens": ledger["max_batch_tokens"],
        "block_size": blocks["block_size"],
        "redis_s": max(0.0, notify_s),
    }
    try:
        return calibrate({"step_times": steps, "cost": shape})
    except ValueError as error:
        raise CliError(f"the simulation cannot be calibrated: {error}", Exit.FAILED) from None


async def _ledger(subject: server.Subject) -> dict[str, Any]:
    async with client.Api(client.Server(subject.url, subject.key)) as api:
        ledger: dict[str, Any]
        (ledger,) = (await api.get("/debug/ledger"))["groups"]
        return ledger


async def _prompts(subject: server.Subject, seed: int) -> None:
    """Prefills of several sizes, alone: a curve wants points that are far apart.

    Some are of many chunks, and each has a short answer: steps alike but for their context.
    """
    async with subject.http() as http:
        for number in range(PROMPTS):
            for words in PROMPT_WORDS:
                text = server.long_prompt(seed + number, words)
                await server.ask(http, subject, text, PROMPT_ANSWER)
        for number in range(PROMPTS, PROMPTS + LONG_PROMPTS):
            await server.ask(http, subject, server.long_prompt(seed + number), PROMPT_ANSWER)


async def _cancels(subject: server.Subject, seed: int) -> dict[str, float]:
    """Median milliseconds from a client's cancel to each of ``STAGES``, on the last rank."""

    async with client.Api(client.Server(subject.url, subject.key)) as api:

        async def one(number: int) -> list[float]:
            async with api.chat(server.story(subject, seed + number, 1500)) as chunks:
                got = 0
                async for chunk in chunks:
                    got += bool(client.piece(chunk))
                    if got == CANCEL_AFTER:
                        break
                asked = time.time()
                receipt = await api.cancel(str(chunk["id"]), "reclaimed")
            (group,) = receipt["groups"]
            ranks = group["ranks"]
            return [max(rank[f"{stage}_at"] for rank in ranks) - asked for stage in STAGES]

        found = await asyncio.gather(*(one(number) for number in range(CANCELLED)))
    return {
        f"{stage}_ms": percentile([times[i] for times in found], 0.5) * 1000
        for i, stage in enumerate(STAGES)
    }
