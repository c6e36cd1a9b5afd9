"""The simulation beside the real engine: the same small workload, with the engine's step times.

The step times are what the leader's exec thread took, while the rest of the stack was running, so
they contain what the processes of one machine take from each other. The way of a stop to the leader
is taken from cancels of another run than the one that is compared.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from stopway_cli import client
from stopway_cli.bench import server
from stopway_cli.bench.figures import percentile
from stopway_cli.errors import CliError, Exit
from stopway_sim.fleet import CostModel, Figure, SmallRun, beside, calibrate

STREAMS, TOKENS = 8, 64
CANCELLED, CANCEL_AFTER = 4, 16
STAGES = ("noticed", "stopped", "reclaimed")


async def measure(
    subject: server.Subject, seed: int, tensor: int, pipeline: int
) -> dict[str, list[Figure]]:
    """Figures by workload, measured and simulated. Raises ``CliError`` without an admin's key."""
    answers, took = await server.answers_of(subject, STREAMS, TOKENS, seed)
    load = SmallRun(STREAMS, answers[0].prompt_tokens, TOKENS)
    told = await _cancels(subject, seed + 100)
    stops = await _cancels(subject, seed + STREAMS)
    cancels = SmallRun(CANCELLED, answers[0].prompt_tokens, 1500, CANCEL_AFTER)
    async with client.Api(client.Server(subject.url, subject.key)) as api:
        (ledger,) = (await api.get("/debug/ledger"))["groups"]
    cost = cost_model(ledger, tensor, pipeline, told.pop("noticed_ms") / 1000)
    del stops["noticed_ms"]
    return {
        f"{STREAMS} streams of {TOKENS} tokens": beside(load, cost, server.rates(answers, took)),
        f"{CANCELLED} cancelled after {CANCEL_AFTER} tokens": beside(cancels, cost, stops),
    }


def cost_model(ledger: dict[str, Any], tensor: int, pipeline: int, notify_s: float) -> CostModel:
    """What a leader's latest steps say. Raises ``CliError`` when they are too few or all alike."""
    steps = [
        # A stage's time; the model wants that of all its stages.
        {"decode": rows, "prefill": tokens, "seconds": seconds * pipeline}
        for rows, tokens, seconds in ledger["step_times"]
    ]
    blocks = ledger["blocks"]
    shape = {
        "tensor": tensor,
        "pipeline": pipeline,
        "window": max(2, pipeline),
        "blocks": blocks["total"],
        "block_size": blocks["block_size"],
        "redis_s": max(0.0, notify_s),
    }
    try:
        return calibrate({"step_times": steps, "cost": shape})
    except ValueError as error:
        raise CliError(f"the simulation cannot be calibrated: {error}", Exit.FAILED) from None


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
