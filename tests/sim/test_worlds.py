"""Seeded worlds: the real planner and replicas with delays, losses, deaths. One seed, one run."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from stopway_sim import SimFailure, run_seed
from stopway_sim.__main__ import main

SEEDS = 300
FIRST = int(os.environ.get("STOPWAY_SIM_SEED", "1"))


def test_seeded_worlds_and_what_they_met() -> None:
    coverage: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        coverage.update(run_seed(seed).coverage)
    if FIRST != 1:
        return
    for state in ("unborn", "queued", "prefilling", "decoding", "preempted"):
        for reason in ("client_cancel", "client_disconnect"):
            assert coverage[f"end {state} x {reason}"], (state, reason)
    for state in ("queued", "prefilling", "decoding"):
        for reason in ("deadline_total", "rank_lost", "admin"):
            assert coverage[f"end {state} x {reason}"], (state, reason)
    for what in (
        "end queued x deadline_queue",
        "end prefilling x deadline_ttft",
        "end decoding x eos",
        "end decoding x length",
        "end decoding x stop_string",
        "end decoding x drain",
        "preemptions",
        "prefill chunks",
        "prefix cache hits",
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
    with pytest.raises(SimFailure, match=r"seed 5 failed .*(?s:.*)-m stopway_sim --seed 5"):
        run_seed(5)
    assert main(["--seed", "5"]) == 1
    assert "replay it with: python -m stopway_sim --seed 5" in capsys.readouterr().err


def test_the_command_prints_what_its_worlds_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2", "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "ended by" in out and "client_cancel" in out and "3 worlds held, 0 failed" in out
