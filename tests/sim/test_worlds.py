"""Seeded worlds: the real planner and replicas with delays, losses, deaths. One seed, one run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stopway_sim import SimFailure, run_seed, table
from stopway_sim.__main__ import main
from stopway_sim.coverage import never_met
from stopway_sim.places import Cause, Place
from stopway_sim.runs import run_many

SEEDS = 500
FIRST = int(os.environ.get("STOPWAY_SIM_SEED", "1"))
SELDOM = {place for place in Place if place.startswith(("preempted", "prefilling, between"))} | {
    Place.IDLE, Place.DRAFT, Place.OVERLAPPED,
}  # fmt: skip
"""Places where few are, or for a part of a turn: not every cause meets them in so few worlds."""


def test_seeded_worlds_and_what_they_met() -> None:
    runs = run_many(FIRST, SEEDS)
    assert not runs.failed, next(iter(runs.failed.values()))
    if FIRST != 1:
        return
    coverage = runs.coverage
    for name in never_met(coverage):
        place, _, cause = name.partition(" x ")
        assert place in SELDOM and cause not in (Cause.UID, Cause.SELECTOR, Cause.LEASE), name
    for what in (
        "decoding, idle x eos",
        "decoding, idle x length",
        "decoding, in flight x eos",
        "decoding, in flight x stop string",
        "decoding, in flight x drain",
        "decoding, idle x grammar end",
        "preemptions",
        "prefill chunks",
        "prefix cache hits",
        "forks",
        "rows with drafts",
        "rows from a source",
        "hazards",
        "mode keep",
        "mode wait",
        "mode abort",
        "mode drain",
        "loads",
        "loads that found no block past its fence",
        "notices lost",
        "notices doubled",
        "stops of the finished",
        "stops of the unknown",
        "stops reported by a follower",
        "stops sent again",
        "stops ended with their epoch",
        "ranks killed",
        "gateway disconnects",
        "refused drain",
        "groups drained",
        "refused duplicate",
        "refused attempt_expired",
        "refused context_length_exceeded",
    ):
        assert coverage[what], what


@pytest.mark.parametrize("seed", [3, 19, 52])
def test_a_seed_replays_itself(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


def test_different_seeds_are_different_worlds() -> None:
    assert len({run_seed(seed).fingerprint for seed in range(20, 40)}) == 20


def test_nothing_depends_on_the_hash_seed() -> None:
    """The same seeds, and so the same logs of turns, under two PYTHONHASHSEED."""
    runs = []
    for hash_seed in ("1", "4242"):
        out = subprocess.run(
            [sys.executable, "-m", "stopway_sim", "--seed", "40", "--seeds", "12", "--json"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        runs.append(json.loads(out.stdout)["runs"])
    assert len(runs[0]) == 12 and runs[0] == runs[1]


def test_a_failing_seed_prints_itself_and_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stopway_core.ledger import Pool

    monkeypatch.setattr(Pool, "drop", lambda self, holder: self._holds.pop(holder, None) and None)
    with pytest.raises(SimFailure, match=r"seed 5 failed .*(?s:.*)make sim SEED=5"):
        run_seed(5)
    assert main(["--seed", "5"]) == 1
    assert "replay it with: make sim SEED=5" in capsys.readouterr().err


def test_the_command_prints_what_its_worlds_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2", "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "transitions taken" in out and "decoding --preempt-->" in out
    assert "stop by uid"[8:] in out and "never met: " in out and "3 worlds held, 0 failed" in out


def test_no_worlds_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0"]) == 2
    out, err = capsys.readouterr()
    assert not out and err == "0 worlds show nothing: give 1 or more as SEEDS\n"


def test_every_cause_has_its_whole_name_over_its_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seed", "2"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("     ")]
    named = {name for head in heads for name in head.strip().split("  ") if name}
    assert {name.strip() for name in named} == set(Cause) - {Cause.POLICY}


def test_the_table_of_stops_is_current() -> None:
    root = Path(__file__).parents[2]
    written = (root / "docs" / "stops.md").read_text(encoding="utf-8")
    assert written == table.document(), "run: python -m stopway_sim table"
