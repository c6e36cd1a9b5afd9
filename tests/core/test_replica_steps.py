"""What a replica makes of forks, drafts, unknown tokens and grammars, turn by turn."""

import pytest

from stopway_core.ledger import GRAMMARS, LedgerError
from stopway_core.replica import Replica, ReplicaError
from stopway_core.turn import Admit, Compile, Launch, Sampled, Turn
from stopway_core.types import DROPPED, REJECTED, SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6]


def admit(rid: int, **kw: int) -> Admit:
    return Admit(rid, list(PROMPT), len(PROMPT), SamplingParams(), "", **kw)


def running(**kw: bool) -> Replica:
    """Request 1 has its prompt and decodes; its first token was 7."""
    replica = Replica(8, 4, grammars=2, **kw)
    replica.apply(Turn(1, admits=[admit(1)], launch=Launch(1, [], [1], [6])))
    replica.apply(Turn(2, results=[Sampled(1, [7], [])]))
    return replica


# --- forks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_fork_shares_what_is_sealed_and_copies_the_rest(prefix_cache: bool) -> None:
    replica = running(prefix_cache=prefix_cache)
    work = replica.apply(Turn(3, admits=[admit(2, fork=1)], launch=Launch(2, [1], [2], [1]))).work
    assert work is not None
    one, two = replica.seqs[1], replica.seqs[2]
    assert two.blocks[0] == one.blocks[0] and two.blocks[1] != one.blocks[1]
    assert work.copies == [(one.blocks[1], two.blocks[1])]
    assert (two.launched, two.confirmed, two.sealed, two.cached_tokens) == (6, 5, 1, 5)
    assert [(row.start, row.tokens, row.samples) for row in work.rows] == [
        (6, [7], 1),
        (5, [6], 1),
    ]
    replica.check()
    assert replica.ledger.blocks.last_step[one.blocks[1]] == 2  # the copy reads it


def test_a_fork_of_whole_blocks_copies_nothing() -> None:
    replica = Replica(8, 4)
    five = [1, 2, 3, 4, 5]
    replica.apply(
        Turn(
            1,
            admits=[Admit(1, list(five), 5, SamplingParams(), "")],
            launch=Launch(1, [], [1], [5]),
        )
    )
    replica.apply(Turn(2, results=[Sampled(1, [7], [])]))
    fork = Admit(2, list(five), 5, SamplingParams(), "", fork=1)
    work = replica.apply(Turn(3, admits=[fork], launch=Launch(2, [], [2], [1]))).work
    assert work is not None and work.copies == []
    assert replica.seqs[2].blocks[0] == replica.seqs[1].blocks[0]
    replica.check()


def test_what_is_copied_outlives_its_request_until_the_step_is_done() -> None:
    replica = running()
    source = replica.seqs[1].blocks[1]
    replica.apply(Turn(3, admits=[admit(2, fork=1)], launch=Launch(2, [], [2], [1])))
    replica.apply(Turn(4, ends=[1]))
    pool = replica.ledger.blocks
    assert pool.refs[source] == 0 and pool.last_step[source] > replica.processed


@pytest.mark.parametrize("fork", [1, 9])
def test_nothing_is_forked_from_who_has_no_prompt_or_is_not_there(fork: int) -> None:
    replica = Replica(8, 4)
    replica.apply(Turn(1, admits=[admit(1)], launch=Launch(1, [], [1], [6])))
    with pytest.raises(ReplicaError, match=f"request 2 cannot be forked from {fork}"):
        replica.apply(Turn(2, admits=[admit(2, fork=fork)]))


def test_a_fork_is_launched_in_its_turn_or_the_epoch_ends() -> None:
    with pytest.raises(ReplicaError, match="forks a request and launches nothing"):
        running().apply(Turn(3, admits=[admit(2, fork=1)]))


# --- drafts and tokens that are not known --------------------------------------------------


def test_wrong_drafts_are_taken_back() -> None:
    replica = running()
    replica.apply(Turn(3, launch=Launch(2, [1], [], [], [[8, 9, 10]])))
    seq = replica.seqs[1]
    assert (seq.launched, len(seq.blocks), seq.pending) == (10, 3, 1)
    replica.apply(Turn(4, results=[Sampled(2, [8, 5], [2])]))
    assert seq.tokens == [*PROMPT, 7, 8, 5]
    assert (seq.launched, seq.confirmed, seq.sealed, len(seq.blocks)) == (8, 8, 2, 3)
    replica.check()
    work = replica.apply(Turn(5, launch=Launch(3, [1], [], []))).work
    assert work is not None and (work.rows[0].start, work.rows[0].tokens) == (8, [5])


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (Sampled(2, [8, 9, 1], [3]), "3 tokens for 2 samples"),
        (Sampled(2, [], [0]), "0 tokens for 2 samples"),
        (Sampled(2, [8, 9, 1], [2]), "sampled 2 tokens, its result has 3"),
        (Sampled(2, [DROPPED], [1]), "dropped request 1, which lives"),
    ],
)
def test_a_result_that_cannot_be_ends_the_epoch(result: Sampled, why: str) -> None:
    replica = running()
    replica.apply(Turn(3, launch=Launch(2, [1], [], [], [[8]])))
    with pytest.raises(ReplicaError, match=why):
        replica.apply(Turn(4, results=[result]))


def test_a_row_with_a_source_feeds_what_the_sampler_has() -> None:
    replica = running()
    replica.apply(Turn(3, launch=Launch(2, [1], [], [])))
    work = replica.apply(Turn(4, launch=Launch(3, [1], [], []))).work
    assert work is not None
    (row,) = work.rows
    assert (row.source, row.start, row.tokens, row.samples) == ((2, 0), 7, [0], 1)
    replica.apply(Turn(5, results=[Sampled(2, [8], []), Sampled(3, [9], [])]))
    assert replica.seqs[1].tokens == [*PROMPT, 7, 8, 9] and replica.seqs[1].confirmed == 8


def test_no_draft_follows_a_token_that_is_not_known() -> None:
    replica = running()
    replica.apply(Turn(3, launch=Launch(2, [1], [], [])))
    with pytest.raises(ReplicaError, match="a draft after a token that is not known"):
        replica.apply(Turn(4, launch=Launch(3, [1], [], [], [[8]])))


def test_who_has_run_all_that_is_known_cannot_decode() -> None:
    replica = Replica(8, 4)
    replica.apply(Turn(1, admits=[admit(1)], launch=Launch(1, [], [1], [3])))
    with pytest.raises(ReplicaError, match="request 1 cannot decode: 6 known, 0 to come, 3 run"):
        replica.apply(Turn(2, launch=Launch(2, [1], [], [])))


def test_after_a_rejection_a_row_may_be_dropped_and_nothing_is_cached_of_it() -> None:
    replica = running()
    replica.apply(Turn(3, launch=Launch(2, [1], [], [])))
    replica.apply(Turn(4, launch=Launch(3, [1], [], [])))
    turn = Turn(5, results=[Sampled(2, [REJECTED], []), Sampled(3, [DROPPED], [])], ends=[1])
    replica.apply(turn)
    pool = replica.ledger.blocks
    assert (pool.free, pool.idle) == (7, 1)


# --- grammars ------------------------------------------------------------------------------


def slots(replica: Replica) -> tuple[int, int, int]:
    pool = replica.ledger.pools[GRAMMARS]
    return pool.free, pool.idle, pool.held


def test_a_slot_is_held_by_its_compilation_then_cached_then_by_who_runs_with_it() -> None:
    replica = running()
    replica.apply(Turn(3, compiles=[Compile(1, "g")]))
    assert slots(replica) == (1, 0, 1)
    replica.apply(Turn(4, compiled=[1]))
    assert slots(replica) == (1, 1, 0)
    work = replica.apply(Turn(5, admits=[admit(2, grammar=1)], launch=Launch(2, [], [2], [2]))).work
    assert work is not None and work.rows[0].grammar == 1 and slots(replica) == (1, 0, 1)
    replica.apply(Turn(6, ends=[2]))
    assert slots(replica) == (1, 1, 0)
    work = replica.apply(Turn(7, launch=Launch(3, [1], [], []))).work
    assert work is not None and work.left == [2]  # its matcher can go
    replica.apply(Turn(8, forgets=[1]))
    assert slots(replica) == (2, 0, 0)


def test_a_slot_that_is_not_the_next_ends_the_epoch() -> None:
    with pytest.raises(ReplicaError, match="grammar slot 2 is not the next that is free"):
        running().apply(Turn(3, compiles=[Compile(2, "g")]))


def test_nobody_runs_with_a_grammar_that_is_not_ready() -> None:
    replica = running()
    replica.apply(Turn(3, compiles=[Compile(1, "g")]))
    with pytest.raises(LedgerError, match="cannot be shared"):
        replica.apply(Turn(4, admits=[admit(2, grammar=1)]))


def test_rows_of_the_preempted_run_on_and_of_the_ended_may_leave() -> None:
    replica = Replica(8, 4)
    launch = Launch(1, [], [1, 2], [6, 6])
    work = replica.apply(Turn(1, admits=[admit(1), admit(2)], launch=launch)).work
    assert work is not None
    seqs = replica.seqs[1], replica.seqs[2]
    replica.apply(Turn(2, ends=[1], preempts=[2]))
    assert [row.pulse.beats for row in work.rows] == [False, True]
    assert [seq.live for seq in seqs] == [False, False]
