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
    return SimpleNamespace(uid=uid, group=group, outcome=outcome, tenant="t", refused=None)


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
