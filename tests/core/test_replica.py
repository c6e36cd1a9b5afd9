"""A replica refuses what cannot follow, and says in one sentence why."""

import pytest

from stopway_core.ledger import LedgerError
from stopway_core.replica import Replica, ReplicaError
from stopway_core.turn import Admit, Launch, Sampled, Turn
from stopway_core.types import SamplingParams


def admit(rid: int = 1, tokens: int = 6) -> Admit:
    return Admit(rid, list(range(tokens)), tokens, SamplingParams(), "")


def running() -> Replica:
    replica = Replica(8, 4)
    replica.apply(Turn(1, admits=[admit()], launch=Launch(1, [], [1], [6])))
    return replica


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (Turn(3), "turn 3 after turn 1"),
        (Turn(1), "turn 1 after turn 1"),
        (Turn(2, digest=1), "replicas differ before turn 2"),
        (Turn(2, results=[Sampled(2, [], [])]), "not in flight"),
        (Turn(2, results=[Sampled(1, [], [])]), "1 tokens for 1 samples"),
        (Turn(2, results=[Sampled(1, [5, 6], [])]), "sampled 1 tokens, its result has 2"),
        (Turn(2, results=[Sampled(1, [5], []), Sampled(1, [5], [])]), "not in flight"),
        (Turn(2, ends=[9]), "request 9 is to end here"),
        (Turn(2, ends=[1, 1]), "request 1 is to end here"),
        (Turn(2, ends=[1], preempts=[1]), "request 1 is to end here"),
        (Turn(2, admits=[admit()]), "admitted twice"),
        (Turn(2, launch=Launch(3, [], [], [])), "step 3 after step 1"),
        (Turn(2, launch=Launch(2, [], [1], [1])), "1 tokens at 6 of 6"),
        (Turn(2, launch=Launch(2, [], [1], [0])), "0 tokens at 6 of 6"),
    ],
)
def test_what_cannot_follow_ends_the_epoch(turn: Turn, why: str) -> None:
    with pytest.raises((ReplicaError, IndexError), match=why):
        running().apply(turn)


def test_the_leaders_digest_is_the_followers() -> None:
    a, b = running(), running()
    b.apply(Turn(2, digest=a.digest))
    assert b.turn == 2


@pytest.mark.parametrize(
    "turn",
    [
        Turn(2),
        Turn(2, ends=[1]),
        Turn(2, results=[Sampled(1, [5], [])]),
        Turn(2, admits=[admit(2)]),
    ],
)
def test_turns_that_do_different_things_have_different_digests(turn: Turn) -> None:
    other = running()
    other.apply(Turn(2, admits=[admit(3, 1)]))
    one = running()
    one.apply(turn)
    assert one.digest != other.digest


def test_only_confirmed_blocks_are_cached() -> None:
    replica = running()
    assert len(replica.cache) == 0
    replica.apply(Turn(2, results=[Sampled(1, [5], [])]))
    assert len(replica.cache) == 1  # 6 of 8 positions are written
    replica.apply(Turn(3, ends=[1]))
    pool = replica.ledger.blocks
    assert (pool.free, pool.idle, pool.held) == (7, 1, 0)


def test_a_stopped_requests_blocks_are_never_cached() -> None:
    replica = running()
    replica.apply(Turn(2, ends=[1]))
    replica.apply(Turn(3, results=[Sampled(1, [5], [])]))
    assert len(replica.cache) == 0 and replica.ledger.blocks.free == 8


def test_check_finds_who_holds_without_running() -> None:
    replica = running()
    del replica.seqs[1]
    with pytest.raises(LedgerError, match="not running"):
        replica.check()


def test_check_finds_a_block_table_that_is_not_what_is_held() -> None:
    replica = running()
    replica.seqs[1].blocks.append(replica.seqs[1].blocks[0])
    with pytest.raises(LedgerError, match="not what it holds"):
        replica.check()


def test_check_finds_blocks_sealed_before_their_step_is_done() -> None:
    replica = running()
    replica.ledger.blocks.seal(replica.seqs[1].blocks[0])
    replica.seqs[1].sealed = 1
    with pytest.raises(LedgerError, match="out of order"):
        replica.check()


def test_another_holder_than_a_request_may_outlive_everybody() -> None:
    replica = Replica(4, 4)
    replica.ledger.blocks.acquire_unordered(("transfer", 1), 2, replica.processed)
    replica.check()
    assert replica.ledger.blocks.held == 2
    assert replica.snapshot()["holders"] == {"transfer:1": 2}
