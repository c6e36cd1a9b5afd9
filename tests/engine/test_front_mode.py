"""An admin's word outlives epochs, and the front: gateways remind a new one of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stopway_core.events import Mode
from stopway_engine.front.mode import LONG_AGO, GroupMode


class Front:
    """A group's mode, and who was told what."""

    def __init__(self) -> None:
        self.leader: list[str] = []
        self.gateways: list[dict[str, Any]] = []
        self.mode = GroupMode(lambda body: self.leader.append(body["mode"]), self.gateways.append)


@pytest.fixture
def front() -> Front:
    return Front()


def reminder(front: Front) -> tuple[Mode, float]:
    """What a gateway remembers of a front."""
    fields = front.gateways[-1]
    return Mode(fields["wanted"]), fields["said_at"]


def test_a_new_front_is_reminded_before_its_leader_comes(front: Front) -> None:
    front.mode.say(Mode.WAITING)
    word = reminder(front)
    new = Front()
    assert new.mode.fields() == {"mode": "running", "wanted": None, "said_at": 0.0}
    new.mode.say(*word)
    new.leader.clear()
    new.mode.leader_came(Mode.RUNNING)  # it said so before it had been told
    assert new.leader == ["wait"]  # before anything else
    assert new.mode.fields()["mode"] == "running" and reminder(new) == word
    new.mode.leader_says(Mode.WAITING)
    assert new.mode.fields()["mode"] == "wait"


def test_a_reminder_that_comes_after_the_leader_still_counts(front: Front) -> None:
    front.mode.leader_came(Mode.RUNNING)
    assert front.leader == []
    front.mode.say(Mode.FROZEN, 5.0)
    assert front.leader == ["keep"]


def test_of_several_reminders_the_newest_counts(front: Front) -> None:
    front.mode.say(Mode.FROZEN, 5.0)
    front.mode.say(Mode.RUNNING, 6.0)  # it was resumed where the first gateway did not hear of it
    front.mode.say(Mode.WAITING, 4.0)
    front.mode.say(Mode.FROZEN, 5.0)
    assert front.leader == ["keep", "running"] and reminder(front) == (Mode.RUNNING, 6.0)


def test_an_admins_word_is_newer_than_any_reminder_whatever_the_clocks_say(front: Front) -> None:
    ahead = time.time() + 3600
    front.mode.say(Mode.FROZEN, ahead)
    front.mode.say(Mode.RUNNING)
    assert front.leader == ["keep", "running"]
    mode, said_at = reminder(front)
    assert mode is Mode.RUNNING and said_at > ahead


def test_a_front_that_is_younger_than_its_leader_takes_its_word(front: Front) -> None:
    front.mode.leader_came(Mode.WAITING)
    assert front.mode.fields()["mode"] == "wait" and front.leader == []
    front.mode.leader_came(Mode.RUNNING)  # the next epoch's
    assert front.leader == ["wait"]
    assert front.mode.fields()["said_at"] == LONG_AGO  # so that gateways remember it, too


def test_what_a_leader_is_in_counts_unless_the_group_was_as_wanted(front: Front) -> None:
    front.mode.leader_came(Mode.WAITING)
    front.mode.say(Mode.FROZEN)  # no leader answers
    front.mode.leader_came(Mode.RUNNING)
    assert front.mode.fields()["mode"] == "running"  # and neither the old nor the wanted one
    front.mode.leader_says(Mode.FROZEN)
    front.mode.leader_came(Mode.RUNNING)
    assert front.mode.fields()["mode"] == "keep"  # it has been told so before all else


def test_each_answer_is_passed_on(front: Front) -> None:
    front.mode.leader_came(Mode.RUNNING)
    for _ in range(2):
        front.mode.leader_says(Mode.RUNNING)
    assert [fields["mode"] for fields in front.gateways] == ["running", "running"]


def test_a_word_whose_age_is_known_is_newer_than_the_leaders(front: Front) -> None:
    front.mode.leader_came(Mode.WAITING)
    front.mode.say(Mode.RUNNING, 2.0)
    assert front.leader == ["running"]


def test_the_same_word_twice_is_told_once_unless_an_admin_says_it_again(front: Front) -> None:
    """Told to abort once more, a leader would end what has come since."""
    front.mode.say(Mode.ABORTED, 5.0)
    front.mode.say(Mode.ABORTED, 6.0)
    assert front.leader == ["abort"] and reminder(front) == (Mode.ABORTED, 6.0)
    front.mode.say(Mode.ABORTED)
    assert front.leader == ["abort", "abort"]
