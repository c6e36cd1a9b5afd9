"""One run: an undisturbed one first, then load and faults together, then the checks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from . import prompts
from .checks import HEALED_S, Checks, ask
from .clients import Clients
from .faults import Faults
from .journal import Journal
from .plan import CLIENTS, SENDERS, Plan
from .signals import Signals
from .world import World, until

CALM_S = 8.0  # of load after the last recovery


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
            if not await until(world.ready, HEALED_S):
                journal.wrong(f"not every gateway is ready {HEALED_S:g} s after the last fault")
            journal.recovered = time.monotonic()
            _say(world, "recovered")
            await asyncio.sleep(CALM_S)
            over.set()
        _say(world, "every client has its answer")
        await signals.in_peace()
        await Checks(world, known).run()
        _say(world, "checked")
        return journal


def _say(world: World, what: str) -> None:
    print(f"{time.monotonic() - world.journal.began:6.1f} s  {what}", flush=True)
