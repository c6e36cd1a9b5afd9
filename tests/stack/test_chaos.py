"""Faults of every kind, overlapping, under load; then nothing is held and all has an outcome."""

import os
import secrets
from pathlib import Path

import pytest

from .chaos.plan import draw
from .chaos.run import run
from .chaos.world import left_behind, until

pytestmark = pytest.mark.model

SEED = int(os.environ.get("CHAOS_SEED") or 1)
SECONDS = float(os.environ.get("CHAOS_SECONDS") or 60)
POLICY = os.environ.get("CHAOS_POLICY") or "native"


def test_the_same_seed_makes_the_same_plan() -> None:
    one, two, other = draw(SEED, 600), draw(SEED, 600), draw(SEED + 1, 600)
    assert one == two != other
    assert [one.wanted(3, turn, 5) for turn in range(50)] == [
        two.wanted(3, turn, 5) for turn in range(50)
    ]


async def test_after_chaos_the_books_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = draw(SEED, SECONDS, POLICY)
    replay = f"CHAOS_POLICY={POLICY} make chaos SEED={SEED} SECONDS={SECONDS:g}"
    print(f"{plan}\nreplay with: {replay}", flush=True)
    token = secrets.token_hex(8)
    monkeypatch.setenv("CHAOS_RUN", token)  # all processes of this run inherit it
    journal = await run(plan, tmp_path / "stack")
    left: list[str] = []

    async def all_gone() -> bool:
        left[:] = left_behind(token)
        return not left

    # One that was killed takes a moment to give its memory back.
    assert await until(all_gone, 30.0), f"processes are left: {left}"
    print(journal.summary(), flush=True)
    if journal.violations:
        found = "\n".join(journal.violations)
        pytest.fail(f"{replay} replays this; logs in {tmp_path}\n{found}", pytrace=False)
    done = {record.wanted.then for record in journal.records if record.ended}
    assert done == {"read", "cancel", "leave"}, "there was no load: the run shows nothing"
