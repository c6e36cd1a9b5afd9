"""One run: an undisturbed one first, then load and faults together, then the checks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from . import prompts
from .checks import HEALED_S, Checks, ask
from .clients import Clients
from .faults import Faults
from .journal import Journal
from .plan import CLIENTS, SENDERS, Plan
from .signals import Signals
from .world import World, until

CALM_S = 8.0  # of load after the last recovery
TOKEN_S = 30.0  # for one token, which goes before all others


async def run(plan: Plan, directory: Path) -> Journal:
    """Carry out ``plan`` on a stack whose logs are in ``directory``; what was seen."""
    async with World(plan, directory) as world:
        asking = [ask(world, 0, prompt) for prompt in range(len(prompts.PROMPTS))]
        answers = await asyncio.gather(*asking)
        assert all(status == 200 for status, _ in answers), answers
        known = [text for _, text in answers]
        for prompt, text in zip(prompts.PROMPTS, known, strict=True):
            assert prompt.matches is None or prompt.matches(text), f"{prompt} got {text!r}"
        journal = world.journal
        journal.began = begun = time.monotonic()
        faults = Faults(world)
        signals = Signals(world)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(Clients(world, known).run(CLIENTS, over))
            group.create_task(signals.run(SENDERS, over))
            await faults.run(plan.faults, begun)
            await faults.heal()
            _say(world, "no more faults")
            for gateway in (0, 1):
                if not await until(lambda gateway=gateway: _serves(world, gateway), HEALED_S):
                    journal.wrong(f"gateway {gateway} serves nobody after the last fault")
            journal.recovered = time.monotonic()
            _say(world, "recovered")
            await asyncio.sleep(CALM_S)
            over.set()
        _say(world, "every client has its answer")
        await signals.in_peace()
        await Checks(world, known).run()
        _say(world, "checked")
        return journal


async def _serves(world: World, gateway: int) -> bool:
    """Whether a token comes through a gateway: for that, every rank is needed.

    The gateway says that it is ready until it has heard of the last fault.
    """
    try:
        response = await world.http[gateway].post(
            "/v1/chat/completions",
            json=prompts.body(0, max_tokens=1, priority=-100),
            headers=world.headers(),
            timeout=TOKEN_S,
        )
    except httpx.TransportError:
        return False
    answered = response.status_code == 200
    return answered and response.json()["choices"][0]["finish_reason"] == "length"


def _say(world: World, what: str) -> None:
    print(f"{time.monotonic() - world.journal.began:6.1f} s  {what}", flush=True)
