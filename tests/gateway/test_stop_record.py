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


@pytest.mark.parametrize("status", ["reclaimed", "already_finished"])
async def test_a_receipt_that_overtakes_the_end_of_an_answer_resolves_nothing(status: str) -> None:
    mine, elsewhere = request("a"), request("b", "g1", Outcome.FINISHED)
    record = record_of(mine, elsewhere)
    part = record.parts["g0"] = Part("s", "g0")
    assert part.merge(receipt(status, stopped=1))
    assert record.status is StopStatus.STOPPED and not record.resolved
    assert record.to_json()["pending_on"] == ["g0: the end of an answer"]
    assert not await record.wait(StopStatus.RECLAIMED, 0)
    mine.outcome = Outcome.STOPPED
    assert record.status == status and record.resolved and not record.to_json()["pending_on"]
    assert await record.wait(StopStatus.RECLAIMED, 0)
