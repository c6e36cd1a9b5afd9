"""What the leader remembers of the dead and of the unborn: bounded in time and number."""

from dataclasses import replace

import pytest

from stopway_core import requests
from stopway_core.lifecycle import Event
from stopway_core.requests import Choice, RequestTable
from stopway_core.types import Outcome, Reason, SamplingParams, Stop, Submission, Target


def submission(uid: str, tenant: str = "t", **kw: object) -> Submission:
    return Submission(uid, 1, tenant, (1, 2), SamplingParams(), 0.0, **kw)  # type: ignore[arg-type]


def add(table: RequestTable, sub: Submission, key: int = 1) -> list[Choice]:
    made = [Choice(key + i, sub, i, 0.0, 10) for i in range(sub.choices)]
    table.add(made)
    return made


def end(
    table: RequestTable, choice: Choice, now: float, outcome: Outcome = Outcome.STOPPED
) -> None:
    choice.move(Event.END)
    table.remove(choice, outcome, now)


def stop(stop_id: str = "s", tenant: str = "t", admin: bool = False) -> Stop:
    return Stop(stop_id, Target(uids=("u",)), Reason.ADMIN, tenant, admin, 0.0)


def test_the_finished_are_known_for_a_time() -> None:
    table = RequestTable(memory_s=60.0)
    (choice,) = add(table, submission("u"))
    end(table, choice, 100.0, Outcome.FINISHED)
    assert table.live("u") == [] and "u" not in table
    table.expire(159.9)
    assert table.finished("u") == (Outcome.FINISHED, "t")
    table.expire(160.0)
    assert table.finished("u") is None


def test_memories_are_bounded_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MEMORY_MAX", 3)
    table = RequestTable(memory_s=60.0)
    for number in range(5):
        table.bury(f"u{number}", stop(), 0.0)
        (choice,) = add(table, submission(f"d{number}"), number)
        end(table, choice, 0.0)
    assert [table.tombstone(f"u{n}", "t") is not None for n in range(5)] == [False] * 2 + [True] * 3
    assert [table.finished(f"d{n}") is not None for n in range(5)] == [False] * 2 + [True] * 3


def test_a_tombstone_that_is_renewed_lives_longer() -> None:
    table = RequestTable(memory_s=10.0)
    table.bury("u", stop("s1"), 0.0)
    table.bury("v", stop("s2"), 1.0)
    table.bury("u", stop("s3"), 5.0)
    table.expire(11.0)
    assert table.tombstone("v", "t") is None
    kept = table.tombstone("u", "t")
    assert kept is not None and kept.stop_id == "s3"


def test_a_tombstone_counts_only_for_those_who_may_stop_it() -> None:
    table = RequestTable(memory_s=10.0)
    table.bury("u", stop("mine"), 0.0)
    table.bury("u", stop("foreign", tenant="evil"), 0.0)
    found = table.tombstone("u", "t")
    assert found is not None and found.stop_id == "mine"
    assert table.tombstone("u", "third") is None
    table.bury("u", stop("admins", tenant="ops", admin=True), 0.0)
    found = table.tombstone("u", "third")
    assert found is not None and found.stop_id == "admins"


def test_a_parent_is_finished_with_its_last_choice() -> None:
    table = RequestTable(memory_s=10.0)
    made = add(table, submission("u", choices=3))
    assert [c.uid for c in table.live("u")] == ["u.0", "u.1", "u.2"]
    end(table, made[1], 0.0)
    assert [c.uid for c in table.live("u")] == ["u.0", "u.2"]
    assert table.finished("u.1") is not None and table.finished("u") is None
    assert table.live("u.1") == []
    end(table, made[0], 0.0)
    end(table, made[2], 0.0)
    assert table.finished("u") is not None
    assert not table.by_key and not table._by_uid


def test_selectors_respect_tenants() -> None:
    table = RequestTable(memory_s=10.0)
    add(table, submission("a", "t", conversation="c"), 1)
    add(table, submission("b", "other", conversation="c"), 2)

    def chosen(target: Target, who: Stop) -> list[str]:
        return [c.uid for c in table.select(replace(who, target=target))]

    everybody = stop("s", tenant="ops", admin=True)
    assert chosen(Target(conversation="c"), stop()) == ["a"]
    assert chosen(Target(conversation="c"), everybody) == ["a", "b"]
    assert chosen(Target(everything=True), stop()) == ["a"]
    assert chosen(Target(everything=True), everybody) == ["a", "b"]
    assert chosen(Target(tenant="other"), stop()) == []
    assert chosen(Target(tenant="other"), everybody) == ["b"]
    assert chosen(Target(conversation="d"), everybody) == []


def test_one_id_is_not_the_beginning_of_another() -> None:
    table = RequestTable(memory_s=10.0)
    add(table, submission("req-1"), 1)
    add(table, submission("req-10"), 2)
    assert [c.uid for c in table.live("req-1")] == ["req-1"]
