"""What admins said of groups: the newest word counts, whoever knows it."""

from __future__ import annotations

from stopway_core.events import Mode
from stopway_gateway.words import AdminWords


def test_a_front_that_knows_none_is_reminded() -> None:
    words = AdminWords()
    assert words.hear("g0", None, 0.0) is None  # nobody has said anything
    assert words.hear("g0", Mode.FROZEN, 5.0) is None
    assert words.hear("g0", None, 0.0) == (Mode.FROZEN, 5.0)
    assert words.hear("g1", None, 0.0) is None


def test_a_front_that_took_over_a_running_leader_is_reminded() -> None:
    words = AdminWords()
    assert words.hear("g0", Mode.RUNNING, 0.0) is None
    assert words.hear("g0", Mode.FROZEN, 5.0) is None
    assert words.hear("g0", Mode.RUNNING, 0.0) == (Mode.FROZEN, 5.0)


def test_an_older_word_is_answered_by_the_newer_and_a_newer_one_taken() -> None:
    words = AdminWords()
    assert words.hear("g0", Mode.FROZEN, 5.0) is None
    assert words.hear("g0", Mode.WAITING, 4.0) == (Mode.FROZEN, 5.0)
    assert words.hear("g0", Mode.FROZEN, 5.0) is None
    assert words.hear("g0", Mode.RUNNING, 6.0) is None
    assert words.hear("g0", None, 0.0) == (Mode.RUNNING, 6.0)
