"""The decisions about groups, as tables of integers and flags."""

from __future__ import annotations

import pytest

from stopway_operator.lifecycle import Facts, Limits, Phase, Step, decide, next_time, phase

NOW = 10_000.0


def new(index: int, **over: object) -> Facts:
    """A group of the wanted revision that serves."""
    base = {"size": 2, "exists": True, "current": True, "replicas": 2, "pods": 2, "ready": True}
    return Facts(index, **{**base, **over})  # type: ignore[arg-type]


def old(index: int, **over: object) -> Facts:
    """A group of another revision that serves."""
    return new(index, **{"current": False, **over})


CASES = {
    "nothing there": ([Facts(0, 2), Facts(1, 2)], {}, {0: "start", 1: "start"}),
    "all well": ([new(0), new(1)], {}, {}),
    "forming": ([new(0, ready=False, pods=1)], {}, {}),
    "scaled by hand": ([new(0, replicas=1)], {}, {0: "start"}),
    "drained for its new revision": ([new(0, replicas=0, pods=0, ready=False)], {}, {0: "start"}),
    "still draining": ([new(0, replicas=0, pods=1, ready=False)], {}, {}),
    "stopped, and its controller has not seen it": (
        [new(0, replicas=0, pods=0, ready=False, synced=False)],
        {},
        {},
    ),
    "stopped, and pods that its controller counts are not seen": (
        [new(0, replicas=0, pods=0, ready=False, counted=2)],
        {},
        {},
    ),
    "pods of a set that is no more": (
        [Facts(0, 2, pods=2, terminating=1)],
        {},
        {},
    ),
    "pods that a deleted set left": ([Facts(0, 2, pods=2)], {}, {0: "start"}),
    "two revisions in one group": ([new(0, mixed=True, ready=False)], {}, {0: "stop"}),
    "name taken": ([new(0, blocked=True, ready=False)], {}, {}),
    "scale-down": ([new(0), new(1), new(2)], {"wanted": 1}, {1: "drain", 2: "drain"}),
    "scale-down, drained": (
        [new(0), new(1, replicas=0, pods=0, ready=False)],
        {"wanted": 1},
        {1: "remove"},
    ),
    "scale-down, draining": (
        [new(0), new(1, replicas=0, pods=2, ready=False)],
        {"wanted": 1},
        {},
    ),
    "scale-down, and its controller has not seen it": (
        [new(0), new(1, replicas=0, pods=0, ready=False, synced=False)],
        {"wanted": 1},
        {},
    ),
    "scale-down, and pods that its controller counts are not seen": (
        [new(0), new(1, replicas=0, pods=0, ready=False, counted=1)],
        {"wanted": 1},
        {},
    ),
    "only its Service is left": ([new(0), Facts(1, 2)], {"wanted": 1}, {1: "remove"}),
    "rollout, the highest first": ([old(0), old(1), old(2)], {}, {2: "stop"}),
    "rollout, two at once": (
        [old(0), old(1), old(2)],
        {"max_unavailable": 2},
        {1: "stop", 2: "stop"},
    ),
    "rollout waits for the group before": ([old(0), old(1), new(2, ready=False)], {}, {}),
    "rollout goes on": ([old(0), old(1), new(2)], {}, {1: "stop"}),
    "rollout waits for gateways to find the new group": (
        [old(0), new(1, unlisted_since=NOW - 59)],
        {},
        {},
    ),
    "rollout waits for no gateway for ever": (
        [old(0), new(1, unlisted_since=NOW - 60)],
        {},
        {0: "stop"},
    ),
    "rollout, a group that no gateway has found is one of those that may be away": (
        [old(0), old(1), new(2, unlisted_since=NOW - 1)],
        {"max_unavailable": 2},
        {1: "stop"},
    ),
    "rollout takes the group that gateways have not found before the one that they use": (
        [old(0, unlisted_since=NOW - 1), old(1)],
        {},
        {0: "stop"},
    ),
    "rollout, gateways have found none yet": (
        [old(0, unlisted_since=NOW - 1), old(1, unlisted_since=NOW - 1)],
        {},
        {},
    ),
    "one replica that gateways have not found": ([old(0, unlisted_since=NOW - 1)], {}, {0: "stop"}),
    "what serves nobody does not wait for gateways": (
        [old(0, ready=False), new(1, unlisted_since=NOW - 1)],
        {},
        {0: "stop"},
    ),
    "one replica": ([old(0)], {}, {0: "stop"}),
    "what serves nobody comes first": ([old(0, ready=False), old(1), old(2)], {}, {0: "stop"}),
    "a bad revision keeps to its group": (
        [old(0, ready=False), old(1), new(2, ready=False)],
        {},
        {},
    ),
    "nothing serves: still one after the other": (
        [old(0, ready=False), old(1, ready=False), old(2, ready=False)],
        {},
        {2: "stop"},
    ),
    "the last one that served is away for a moment": (
        [old(0, ready=False), new(1, ready=False)],
        {},
        {},
    ),
    "back from a bad revision": ([new(0), new(1), old(2, ready=False)], {}, {2: "stop"}),
    "an old group that was stopped": (
        [old(0, replicas=0, pods=0, ready=False)],
        {},
        {0: "start"},
    ),
    "half scheduled, not for long": (
        [new(0, ready=False, incomplete_since=NOW - 10)],
        {},
        {},
    ),
    "half scheduled: the youngest goes": (
        [
            new(0, ready=False, incomplete_since=NOW - 400, born=2.0),
            new(1, ready=False, incomplete_since=NOW - 400, born=1.0),
        ],
        {},
        {0: "release"},
    ),
    "half scheduled: one at a time": (
        [
            new(0, ready=False, incomplete_since=NOW - 400),
            new(1, ready=False, replicas=0, pods=0, released_at=NOW - 30, releases=1),
        ],
        {},
        {},
    ),
    "gangs are never released": (
        [new(0, ready=False, incomplete_since=NOW - 4000)],
        {"incomplete_s": 0},
        {},
    ),
    "released, later": (
        [new(0, ready=False, replicas=0, pods=0, released_at=NOW - 61, releases=1)],
        {},
        {0: "start"},
    ),
    "released twice, much later": (
        [new(0, ready=False, replicas=0, pods=0, released_at=NOW - 61, releases=2)],
        {},
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_next_steps(name: str) -> None:
    groups, limits, wanted = CASES[name]
    given = Limits(**{"wanted": len(groups), **limits})  # type: ignore[arg-type]
    assert {i: step.value for i, step in decide(groups, given, NOW).items()} == wanted


def test_a_rollout_step_by_step() -> None:
    """Each step is what the one before has made possible."""
    limits = Limits(wanted=2)
    story = [
        ([old(0), old(1)], {1: Step.STOP}),
        ([old(0), new(1, replicas=0, ready=False)], {}),
        ([old(0), new(1, replicas=0, pods=0, ready=False)], {1: Step.START}),
        ([old(0), new(1, pods=1, ready=False)], {}),
        ([old(0), new(1)], {0: Step.STOP}),
        ([new(0, replicas=0, ready=False), new(1)], {}),
        ([new(0, replicas=0, pods=0, ready=False), new(1)], {0: Step.START}),
        ([new(0), new(1)], {}),
    ]
    for groups, wanted in story:
        assert decide(groups, limits, NOW) == wanted


def test_phases() -> None:
    assert phase(Facts(0)) is Phase.ABSENT
    assert phase(new(0)) is Phase.READY
    assert phase(new(0, ready=False)) is Phase.FORMING
    assert phase(new(0, replicas=0)) is Phase.DRAINING
    assert phase(new(0, replicas=0, pods=0, counted=1)) is Phase.DRAINING
    assert phase(new(0, replicas=0, pods=0, released_at=1.0)) is Phase.RELEASED
    assert phase(new(0, blocked=True)) is Phase.BLOCKED


def test_time_alone_asks_for_a_step() -> None:
    limits = Limits(wanted=2)
    waiting = new(0, ready=False, incomplete_since=NOW - 100)
    released = new(1, ready=False, replicas=0, pods=0, released_at=NOW - 10, releases=1)
    assert next_time([waiting], limits, NOW) == NOW + 200
    assert next_time([released], limits, NOW) == NOW + 50
    assert next_time([new(0)], limits, NOW) is None
