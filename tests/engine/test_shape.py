"""What the leader records of a step, to calibrate a simulation with."""

from __future__ import annotations

from stopway_core.replica import Replica
from stopway_core.turn import Admit, Launch
from stopway_core.types import SamplingParams
from stopway_engine.control.shape import StepShape


def test_a_step_is_summed_with_what_is_before_its_tokens() -> None:
    replica = Replica(64, 4)
    for rid, tokens in ((1, 5), (2, 9), (3, 20)):
        replica.admit(Admit(rid, list(range(rid, rid + tokens)), tokens, SamplingParams(), ""))
    first = Launch(1, [], [1, 2, 3], [5, 9, 8])
    shape = StepShape.of(first, replica.launch(first))
    assert shape.timed(0.5) == (1, 0, 22, 0, 0, 0.5)
    second = Launch(2, [1, 2], [3], [7])
    shape = StepShape.of(second, replica.launch(second))
    assert shape.timed(0.5) == (2, 2, 7, 5 + 9, 7 * 8, 0.5)
    assert shape.rids == {1, 2, 3}


def test_drafts_are_rows_that_share_a_context() -> None:
    replica = Replica(64, 4)
    replica.admit(Admit(1, [1, 2, 3, 4, 5, 6], 5, SamplingParams(), ""))
    replica.seqs[1].launched = replica.seqs[1].confirmed = 5  # its prompt has been computed
    launch = Launch(1, [1], [], [], drafts=[[7, 8]])
    shape = StepShape.of(launch, replica.launch(launch))
    assert shape.timed(0.5) == (1, 3, 0, 5, 0, 0.5)
