"""Whatever the start and wherever the operator dies: the same end, in bounded time.

Hypothesis drives a small cluster through changes, lost nodes and deletions, kills the operator
between any two writes, and then lets things heal.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stopway_operator import objects
from stopway_operator.simulation import ConflictError, Simulation

CHANGES: dict[str, Any] = {
    "scale": st.integers(0, 3).map(lambda n: {"replicas": n}),
    "image": st.sampled_from(["a", "b", "broken"]).map(lambda i: {"podTemplate": {"image": i}}),
    "shape": st.sampled_from([1, 2]).map(
        lambda p: {"parallelism": {"tensor": 2, "ranksPerPod": p}}
    ),
    "budget": st.integers(1, 3).map(lambda n: {"rollout": {"maxUnavailable": n}}),
}
ACTIONS = st.one_of(
    *(values.map(lambda value: ("change", value)) for values in CHANGES.values()),
    st.tuples(st.just("kill pod"), st.integers(0, 20)),
    st.tuples(st.just("lose"), st.sampled_from(["n1", "n2"])),
    st.tuples(st.just("restore"), st.sampled_from(["n1", "n2"])),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.integers(1, 12)),
)


def act(simulation: Simulation, action: tuple[str, Any]) -> None:
    what, value = action
    if what == "change":
        simulation.change(**value)
    elif what == "kill pod" and simulation.pods:
        names = sorted(simulation.pods)
        simulation.delete_pod(names[value % len(names)])
    elif what == "lose":
        simulation.lose(value)
    elif what == "restore" and value in simulation.lost:
        simulation.restore(value)
    elif what == "remove" and simulation.objects:
        keys = sorted(simulation.objects)
        del simulation.objects[keys[value % len(keys)]]


def shape(simulation: Simulation) -> dict[str, Any]:
    """The fixed point, without what differs between two ways to it."""
    status = (simulation.service or {})["status"]
    return {
        "objects": {key: obj["spec"] for key, obj in simulation.objects.items()},
        "pods": sorted(
            n for n, p in simulation.pods.items() if objects.label(p, "stopway.dev/group")
        ),
        "ready": [(group["name"], group["ready"]) for group in status["groups"]],
        "conditions": [(c["type"], c["status"], c["reason"]) for c in status["conditions"]],
    }


def never_mixed(simulation: Simulation) -> None:
    found: dict[str, set[str]] = {}
    for pod in simulation.pods.values():
        group = objects.label(pod, objects.LABEL_GROUP)
        if group and not objects.deleting(pod):
            found.setdefault(group, set()).add(objects.label(pod, objects.LABEL_REVISION))
    assert all(len(revisions) == 1 for revisions in found.values()), found


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=10),
    deaths=st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=30),
)
def test_it_converges_from_anywhere(
    actions: list[tuple[str, Any]], deaths: list[int | None]
) -> None:
    simulation = Simulation(bad_images={"broken"}, drain_s=2.0, load_s=2.0)
    spec = {"model": {"uri": "builtin:smollm2"}, "recovery": {"lostNodeSeconds": 10}}
    simulation.create("chat", spec)
    turn = 0
    for action in actions:
        act(simulation, action)
        for _ in range(action[1] if action[0] == "wait" else 2):
            with suppress(ConflictError):  # what was seen is no longer so: it looks again
                simulation.reconcile(writes_max=deaths[turn % len(deaths)])
            turn += 1
            simulation.tick()
            never_mixed(simulation)
    for node in list(simulation.lost):
        simulation.restore(node)
    simulation.change(replicas=2, podTemplate={"image": "a"}, parallelism={"tensor": 2})
    assert simulation.settle(rounds=200) < 200
    fresh = Simulation()
    fresh.create("chat", simulation.service["spec"])  # type: ignore[index]
    assert fresh.service is not None and simulation.service is not None
    fresh.service["metadata"] |= {"uid": objects.uid_of(simulation.service)}
    fresh.settle()
    assert shape(simulation) == shape(fresh)


def test_the_operator_dies_after_every_single_write() -> None:
    """One write in each of its lives: slow, and it gets there all the same."""
    simulation = Simulation()
    simulation.create("chat", {"model": {"uri": "builtin:smollm2"}, "replicas": 2})
    for _ in range(60):
        simulation.reconcile(writes_max=1)
        simulation.tick()
    simulation.change(podTemplate={"image": "next"})
    for _ in range(90):
        simulation.reconcile(writes_max=1)
        simulation.tick()
        never_mixed(simulation)
    simulation.settle()
    images = {
        pod["spec"]["containers"][0]["image"]
        for pod in simulation.pods.values()
        if objects.label(pod, objects.LABEL_GROUP)
    }
    assert images == {"next"}
