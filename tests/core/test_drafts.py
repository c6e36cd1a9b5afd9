"""Proposals: what followed the last time, as much as there is room for, less after a failure."""

from hypothesis import given
from hypothesis import strategies as st

from stopway_core.drafts import LEARN_MAX, NGRAM, POSITIONS_MAX, REST_TOKENS, Drafter


def test_what_followed_the_last_time() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3]
    assert Drafter(tokens, 4).propose(9) == [6, 7, 8, 1]  # the newest time counts
    assert Drafter(tokens, 4).propose(2) == [6, 7]
    assert Drafter(tokens, 4).propose(0) == [] and Drafter(tokens, 4).propose(-3) == []


def test_nothing_where_nothing_came_before() -> None:
    assert Drafter([1, 2, 3, 4, 5, 6], 4).propose(9) == []
    assert Drafter([1, 2, 3], 4).propose(9) == []  # the n-gram itself is not its past


def test_new_tokens_are_learned_as_they_come() -> None:
    tokens = [1, 2, 3]
    drafter = Drafter(tokens, 4)
    tokens += [4, 1, 2, 3]
    assert drafter.propose(9) == [4, 1, 2, 3]


def test_a_success_makes_it_bolder_and_a_failure_shorter() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    drafter = Drafter(tokens, 4)
    drafter.verified(4, 1)
    assert len(drafter.propose(9)) == 1
    for size in (2, 3, 4, 4):
        drafter.verified(1, 1)
        assert len(drafter.propose(9)) == size


def test_a_proposal_of_which_nothing_was_right_is_followed_by_a_rest() -> None:
    tokens = [1, 1, 1, 1]
    drafter = Drafter(tokens, 4)
    assert drafter.propose(9)
    drafter.verified(1, 0)
    for _ in range(REST_TOKENS):
        assert drafter.propose(9) == []
        tokens.append(1)
    assert len(drafter.propose(9)) == 1


def test_it_goes_on_with_a_copy() -> None:
    tokens = [1, 2, 3, 4]
    drafter = Drafter(tokens, 4)
    copy = [*tokens, 1, 2, 3]
    drafter.follow(copy)
    assert drafter.propose(1) == [4]


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 6))
def test_a_proposal_is_a_run_of_its_own_tokens_after_the_same_ngram(
    tokens: list[int], room: int
) -> None:
    found = Drafter(tokens, 4).propose(room)
    assert len(found) <= min(room, 4)
    last = tokens[-NGRAM:]
    places = [at for at in range(NGRAM, len(tokens)) if tokens[at - NGRAM : at] == last]
    if found:
        assert tokens[places[-1] :][: len(found)] == found
    else:
        assert not room or not places or len(tokens) <= NGRAM


def test_a_long_prompt_is_learned_in_bounded_pieces_the_newest_part_of_it() -> None:
    tokens = [i % 5000 for i in range(20_000)] + [1, 2, 3]
    drafter = Drafter(tokens, 4)
    assert len(drafter._index) <= LEARN_MAX
    pieces = 0
    while drafter.propose(4) == []:
        pieces += 1
        assert pieces < 40
    assert drafter.propose(4) == [4, 5, 6, 7]
    assert len(drafter._index) <= POSITIONS_MAX
