"""Receipts: what each rank said, and no more."""

import pytest

from stopway_core.ledger import Dropped
from stopway_core.receipts import RankInfo, Receipt, ReceiptBook
from stopway_core.replica import StopApplied
from stopway_core.types import Reason, Stop, StopStatus, Target

STOP = Stop("s", Target(uids=("u",)), Reason.CLIENT_CANCEL, "t", False, 0.0)


def book(ranks: int = 2, **kw: int) -> ReceiptBook:
    return ReceiptBook("g", 7, [RankInfo(r, r // 2, f"n{r}") for r in range(ranks)], **kw)


def opened(receipts: ReceiptBook, turn: int = 3, drain: int = 5, stop: Stop = STOP) -> Receipt:
    receipt = receipts.open(stop)
    receipt.matched("u", "stopped")
    receipts.effective(turn, StopApplied(stop.stop_id, "", drain, Dropped(2, 1, 0)))
    return receipt


def statuses(receipts: ReceiptBook) -> list[str]:
    return [r["status"] for r in receipts.changed()]


def test_the_status_rises_with_the_slowest_rank() -> None:
    receipts = book()
    receipt = opened(receipts)
    assert statuses(receipts) == ["noticed"]
    receipts.progress(0, applied=3, applied_at=10.0, executed=4, executed_at=10.5)
    assert statuses(receipts) == []
    assert receipts.pending_on(receipt) == ["rank 0: step 5 in flight", "rank 1: turn 3"]
    receipts.progress(1, 3, 11.0, 5, 12.0)
    assert statuses(receipts) == ["stopped"]
    assert receipts.pending_on(receipt) == ["rank 0: step 5 in flight"]
    receipts.progress(0, 4, 12.0, 5, 13.0)
    (out,) = receipts.changed()
    assert (out["status"], out["pending_on"], out["epoch"]) == ("reclaimed", [], 7)
    assert (out["blocks_reclaimed"], out["blocks_cached"], out["blocks_lent"]) == (2, 1, 0)
    assert [(r["stopped_at"], r["reclaimed_at"]) for r in out["ranks"]] == [
        (10.0, 13.0),
        (11.0, 12.0),
    ]
    assert [(r["rank"], r["node"]) for r in out["ranks"]] == [(0, "n0"), (1, "n1")]


def test_a_stop_with_nothing_in_flight_is_reclaimed_when_it_is_applied() -> None:
    receipts = book(1)
    opened(receipts, drain=0)
    receipts.progress(0, 3, 10.0, 99, 8.0)
    (out,) = receipts.changed()
    assert out["status"] == "reclaimed" and out["ranks"][0]["reclaimed_at"] == 10.0


def test_progress_before_the_turn_says_nothing() -> None:
    receipts = book(1)
    receipt = opened(receipts, turn=3)
    receipts.progress(0, 2, 9.0, 9, 9.0)
    assert receipt.status is StopStatus.NOTICED and receipt.parts[0].stopped_at is None


def test_the_first_notice_counts_even_one_that_came_before_the_leader_knew() -> None:
    receipts = book()
    receipts.noticed(1, "s", turn=2, at=5.0)
    receipts.noticed(1, "s", turn=3, at=6.0)
    receipt = opened(receipts)
    receipts.noticed(0, "s", 2, 7.0)
    receipts.noticed(0, "s", 1, 6.5)
    assert [(p.turn_noticed, p.noticed_at) for p in receipt.parts] == [(1, 6.5), (2, 5.0)]


def test_a_notice_that_came_after_the_turn_is_not_the_first() -> None:
    receipts = book(1)
    receipt = opened(receipts)
    receipts.noticed(0, "s", turn=3, at=20.0)
    receipts.progress(0, 3, 10.0, 5, 30.0)
    part = receipt.parts[0]
    assert (part.noticed_at, part.stopped_at, part.reclaimed_at) == (10.0, 10.0, 30.0)


def test_early_notices_are_bounded() -> None:
    receipts = book(1, keep_max=3)
    for number in range(10):
        receipts.noticed(0, f"x{number}", 1, 1.0)
    assert len(receipts._early) <= 3
    for _ in range(10):
        receipts.noticed(0, "x9", 1, 1.0)
    assert len(receipts._early["x9"]) == 1


def test_a_stop_of_what_had_ended_is_final_at_once() -> None:
    receipts = book()
    receipt = receipts.open(STOP)
    receipt.matched("u", "finished")
    receipt.already += 1
    receipts.effective(1, StopApplied("s", "", 0, Dropped()))
    (out,) = receipts.changed()
    assert (out["status"], out["outcome"]["finished"]) == ("already_finished", 1)
    assert receipts.pending_on(receipt) == []


def test_a_stop_of_some_that_had_ended_goes_the_whole_way() -> None:
    receipts = book(1)
    receipt = receipts.open(STOP)
    receipt.matched("u", "finished")
    receipt.already += 1
    receipt.matched("v", "stopped")
    receipts.effective(1, StopApplied("s", "", 0, Dropped()))
    receipts.progress(0, 1, 1.0, 0, 0.0)
    assert receipt.status is StopStatus.RECLAIMED


def test_a_request_that_comes_after_its_stop_is_counted_once() -> None:
    receipts = book(1)
    receipt = receipts.open(STOP)
    receipt.unmatched("u")
    receipts.effective(1, StopApplied("s", "", 0, Dropped()))
    receipts.progress(0, 1, 1.0, 0, 0.0)
    assert receipt.status is StopStatus.RECLAIMED and receipt.outcomes == {"unknown": 1}
    receipt.arrived("u")
    receipt.matched("u.0", "stopped")
    receipt.matched("u.1", "stopped")
    receipts.effective(5, StopApplied("s", "", 0, Dropped(1, 0, 0)))
    assert receipt.turn_effective == 5
    assert (receipt.count, receipt.uids) == (2, ["u.0", "u.1"])
    assert receipt.outcomes == {"unknown": 0, "stopped": 2}
    receipts.progress(0, 4, 2.0, 0, 0.0)
    assert receipt.status is StopStatus.NOTICED
    receipts.progress(0, 5, 3.0, 0, 0.0)
    assert receipt.status is StopStatus.RECLAIMED
    assert (receipt.parts[0].stopped_at, receipt.parts[0].reclaimed_at) == (3.0, 3.0)


def test_more_than_a_hundred_ids_are_counted_and_not_listed() -> None:
    receipts = book(1)
    receipt = receipts.open(STOP)
    for number in range(250):
        receipt.unmatched(f"u{number}")
    for number in range(250):
        receipt.arrived(f"u{number}")
        receipt.matched(f"u{number}", "stopped")
    out = receipts.to_json(receipt)
    assert out["count"] == 250 and len(out["request_ids"]) == 100
    assert (out["outcome"]["stopped"], out["outcome"]["unknown"]) == (250, 0)


def test_asking_again_publishes_again() -> None:
    receipts = book(1)
    opened(receipts)
    assert len(receipts.changed()) == 1 and receipts.changed() == []
    receipts.touch("s")
    receipts.touch("nobody")
    assert [r["stop_id"] for r in receipts.changed()] == ["s"]


@pytest.mark.parametrize("keep", [1, 3])
def test_old_receipts_go_even_when_they_are_open(keep: int) -> None:
    receipts = book(1, keep_max=keep)
    for number in range(5):
        stop = Stop(f"s{number}", STOP.target, STOP.reason, "t", False, 0.0)
        opened(receipts, turn=number + 1, stop=stop)
    assert receipts.get("s0") is None and receipts.get("s4") is not None
    assert len(receipts._open) == keep
    receipts.effective(9, StopApplied("s0", "", 0, Dropped()))  # forgotten: no error
    receipts.progress(0, 9, 1.0, 9, 1.0)
    assert not receipts._open
