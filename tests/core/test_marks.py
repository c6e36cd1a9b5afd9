"""Stops that take effect later, as five of the policies have them: counted once, and to the end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from stopway_core.events import LeaseLost, Mode, ModeChanged
from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines, Target

if TYPE_CHECKING:
    from .conftest import Rig

    Rigs = Callable[..., Rig]

LATER = ["sglang", "llamacpp", "tensorrt-llm", "deepinfer"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_selector_counts_everybody_once_whatever_came_with_it(rig: Rigs, policy: str) -> None:
    r = rig(policy=policy)
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result())
    r.turn(r.submit("b"), r.stop("s", target=Target(everything=True), admin=True))
    r.run()
    receipt = r.receipts.get("s")
    assert (receipt.count, sorted(receipt.uids), receipt.marked) == (2, ["a", "b"], 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_events_of_one_batch_in_any_order_leave_nothing_open(rig: Rigs, policy: str) -> None:
    for order in permutations(range(5)):
        r = rig(policy=policy)
        r.turn(r.submit("a", max_tokens=9, gateway="gw"), r.submit("b", max_tokens=9))
        r.turn(r.result())
        events = [
            r.submit("c", gateway="gw"),
            r.stop("s", target=Target(everything=True), admin=True),
            r.stop("t", "a", "c", "a"),
            LeaseLost("gw"),
            ModeChanged(Mode.WAITING),
        ]
        r.turn(*(events[i] for i in order))
        r.run()
        r.maybe(ModeChanged(Mode.RUNNING))
        r.run()
        for stop_id in ("s", "t"):
            receipt = r.receipts.get(stop_id)
            assert receipt.count == len(set(receipt.uids)) and receipt.marked == 0, (order, policy)
        assert not r.planner.requests.by_key and r.counts[2] == 0


@pytest.mark.parametrize("policy", LATER)
def test_what_a_marked_request_discards_is_in_its_receipt(rig: Rigs, policy: str) -> None:
    r = rig(policy=policy, window=2)
    r.turn(r.submit("a", max_tokens=9, deadlines=Deadlines(total=1.0)))
    r.turn(r.result())
    r.turn()
    r.turn(r.stop("s", "a"))
    r.now += 1.0  # its deadline is what ends it, and its stop why
    (ended,) = r.turn().outputs.ended
    assert ended.reason == "client_cancel" and ended.discarded_tokens > 0
    assert r.receipts.get("s").tokens_discarded == ended.discarded_tokens


def test_a_receipt_that_was_forgotten_is_not_made_anew(rig: Rigs) -> None:
    r = rig(policy="sglang")
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result())
    r.receipts._keep_max = 1
    r.turn(r.stop("s", "a"))
    r.turn(r.stop("t", "nobody"))
    assert r.receipts.get("s") is None
    r.turn(r.result())
    assert not r.planner.requests.by_key and r.receipts.get("s") is None


def test_who_was_retracted_to_the_tail_runs_to_its_end_while_the_queue_stands(rig: Rigs) -> None:
    r = rig(policy="sglang", blocks=7)
    r.turn(r.submit("a", 4, max_tokens=12), r.submit("b", 4, max_tokens=12), r.submit("c", 4))
    while not r.turn(r.result()).turn.preempts:
        pass
    r.maybe(ModeChanged(Mode.WAITING))
    r.turn(r.submit("d"))
    r.run()
    assert [c.uid for c in r.planner.requests.by_key.values()] == ["c", "d"]


def test_what_ends_a_marked_request_says_how_much_of_it_was_delivered(rig: Rigs) -> None:
    """Both steps in flight come back at once, and the first of them ends it."""
    r = rig(policy="tensorrt-llm", window=2)
    r.turn(r.submit("a", max_tokens=9))
    r.turn(r.result())
    r.maybe()
    assert len(r.replica.in_flight) == 2
    r.turn(r.stop("s", "a"))
    planned = r.turn(r.result(r.EOS), r.result(8, skip=1))
    (ended,) = planned.outputs.ended
    assert planned.outputs.tokens == [r.EOS] and ended.reason == "client_cancel"
    assert (ended.keep, ended.discarded_tokens) == (2, 1)
