"""A stop as its gateway sums it up: of its parts, and of the requests that are its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stopway_core.types import Outcome, Reason, Stop, StopStatus, Target
from stopway_gateway.request import Trace
from stopway_gateway.stops import Part, StopRecord


def record_of(*requests: SimpleNamespace) -> StopRecord:
    uids = tuple(request.uid for request in requests)
    stop = Stop("s", Target(uids=uids), Reason.CLIENT_CANCEL, "t", False, 0.0)
    record = StopRecord(stop, Trace("", ""), "")
    for request in requests:
        record.add_match(request)
    return record


def request(uid: str, group: str = "g0", outcome: Outcome | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        uid=uid, group=group, outcome=outcome, tenant="t", refused=False, dispatched=True
    )


def receipt(status: str, **outcome: int) -> dict[str, Any]:
    return {"stop_id": "s", "group": "g0", "epoch": 1, "status": status, "outcome": outcome}


@pytest.mark.parametrize("status", ["stopped", "reclaimed", "already_finished"])
async def test_a_receipt_that_overtakes_the_end_of_an_answer_resolves_nothing(status: str) -> None:
    mine, elsewhere = request("a"), request("b", "g1", Outcome.FINISHED)
    record = record_of(mine, elsewhere)
    part = record.parts["g0"] = Part("s", "g0")
    assert part.merge(receipt(status, stopped=1))
    assert record.status is StopStatus.NOTICED
    assert "g0: the end of an answer" in record.to_json()["pending_on"]
    assert not await record.wait(StopStatus.STOPPED, 0)
    mine.outcome = Outcome.STOPPED
    record.end(mine)
    assert record.status == status
    assert "g0: the end of an answer" not in record.to_json()["pending_on"]
    assert await record.wait(StopStatus.STOPPED, 0)


def test_a_stop_of_one_that_had_ended_waits_for_no_proof_of_it() -> None:
    """A group that has forgotten it, and is asked for another, says that it knows neither."""
    record = record_of(request("a", outcome=Outcome.STOPPED))
    part = record.parts["g0"] = Part("s", "g0")
    assert part.merge(receipt("reclaimed", unknown=1))
    assert record.resolved


def test_what_another_gateway_runs_at_a_group_is_not_resolved_by_unknown() -> None:
    """The stop overtook a request that its front prepared: the leader had not heard of it."""
    record = record_of()
    part, other = Part("s", "g0"), Part("s", "gateway:b")
    record.parts |= {"g0": part, "gateway:b": other}
    part.merge(receipt("reclaimed", unknown=1))
    assert not record.known
    theirs = {"group": "gateway:b", "groups": ["g0"]}
    other.merge(receipt("noticed") | theirs)
    assert record.known and record.status is StopStatus.NOTICED
    other.merge(receipt("already_finished") | theirs)
    assert record.status is StopStatus.NOTICED
    part.merge(receipt("reclaimed", stopped=1))
    assert record.status is StopStatus.RECLAIMED
    assert [shown["group"] for shown in record.to_json()["groups"]] == ["g0"]


def parts_of(record: StopRecord, *groups: str) -> list[Part]:
    record.parts |= {group: Part("s", group) for group in groups}
    return [record.parts[group] for group in groups]


def test_a_last_word_that_never_comes_holds_nothing_up() -> None:
    """Its gateway was killed, or Redis lost it; all the groups that it named have answered."""
    record = record_of()
    group, other = parts_of(record, "g0", "gateway:b")
    other.merge(receipt("noticed") | {"group": "gateway:b", "groups": ["g0"]})
    assert record.status is StopStatus.ACCEPTED
    group.merge(receipt("reclaimed", stopped=1))
    assert record.status is StopStatus.RECLAIMED
    assert record.to_json()["pending_on"] == []


def test_a_group_that_no_gateway_names_any_more_owes_nothing() -> None:
    record = record_of()
    other, named, told = parts_of(record, "gateway:b", "g9", "g0")
    named.named_only = True
    other.merge(receipt("noticed") | {"group": "gateway:b", "groups": ["g9"]})
    assert record.unnamed() == []
    other.merge(receipt("already_finished") | {"group": "gateway:b", "groups": []})
    assert record.unnamed() == [named]
    told.merge(receipt("reclaimed", stopped=1))
    assert record.status is StopStatus.RECLAIMED


def test_all_that_match_are_awaited_however_many() -> None:
    requests = [request(str(n), "g0" if n < 100 else "g1") for n in range(150)]
    record = record_of(*requests)
    assert record.answering == ["g0", "g1"]
    for part in parts_of(record, "g0", "g1"):
        part.merge(receipt("reclaimed", stopped=1))
    for each in requests[:149]:
        each.outcome = Outcome.STOPPED
        record.end(each)
    assert record.status_here is record.status is StopStatus.NOTICED
    requests[149].outcome = Outcome.STOPPED
    record.end(requests[149])
    assert record.status is StopStatus.RECLAIMED


def test_a_group_does_not_answer_for_one_that_had_finished_before_the_stop() -> None:
    """Its end was on the way; by now its group has forgotten it, and says so."""
    mine = request("a")
    record = record_of(mine)
    (part,) = parts_of(record, "g0")
    part.merge(receipt("already_finished", unknown=1))
    assert record.status is StopStatus.NOTICED and record.to_json()["pending_on"]
    mine.outcome = Outcome.FINISHED
    record.end(mine)
    assert record.answering == [] and record.resolved
    assert record.to_json()["pending_on"] == []
