"""One log of turns, replayed by replicas in processes with other hash seeds, gives one digest."""

import os
import subprocess
import sys
from pathlib import Path

from stopway_core.config import PlannerConfig
from stopway_core.events import StopSignal, Submit
from stopway_core.types import Reason, SamplingParams, Stop, Submission, Target
from stopway_sim import Group, GroupShape

REPLAY = """
import sys
from stopway_core.replica import Replica
from stopway_core.turn import decode_turn
from stopway_core.wire import Decoder
replica = Replica(12, 4, grammars=4)
for frame in Decoder().feed(open(sys.argv[1], "rb").read()):
    replica.apply(decode_turn(frame))
replica.check()
print(f"{replica.turn} {replica.digest:016x} {replica.ledger.blocks.free}")
"""


def test_one_log_gives_one_digest_under_any_hash_seed(tmp_path: Path) -> None:
    group = Group(GroupShape(blocks=12), PlannerConfig(max_model_len=48, max_batch_tokens=16))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    events: list[object] = [
        Submit(Submission(f"r{i}", 1, "t", tuple(range(i, i + 9)), params, 1.0, salt=f"s{i % 3}"))
        for i in range(8)
    ]
    stop = Stop("s", Target(uids=("r5",)), Reason.CLIENT_CANCEL, "t", False, 1.0)
    group.drive(1.0, [*events, StopSignal(stop)])  # type: ignore[list-item]
    group.check_idle()
    log = tmp_path / "turns"
    log.write_bytes(b"".join(group.log))
    said = set()
    for hash_seed in ("0", "1", "31337"):
        said.add(
            subprocess.run(
                [sys.executable, "-c", REPLAY, str(log)],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout
        )
    leader = group.ranks[0].replica
    expected = f"{leader.turn} {leader.digest:016x} {leader.ledger.blocks.free}\n"
    assert said == {expected} and leader.turn > 30
