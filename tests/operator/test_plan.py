"""Stories: the plan against a small cluster, from one event to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stopway_operator import kinds, objects
from stopway_operator.observed import Observed
from stopway_operator.plan import EPOCH_RETRY_S, POLL_S, Plan, plan
from stopway_operator.simulation import TOKENS, Simulation
from stopway_operator.writes import Verb

MODEL = {"uri": "builtin:smollm2"}
PAIR = {"tensor": 2, "ranksPerPod": 1}  # groups of two pods


def service(simulation: Simulation, **spec: Any) -> Simulation:
    simulation.create("chat", {"model": MODEL, "parallelism": PAIR, **spec})
    return simulation


def settled(**spec: Any) -> Simulation:
    simulation = service(Simulation(), **spec)
    simulation.settle()
    return simulation


def condition(simulation: Simulation, kind: str) -> tuple[str, str]:
    assert simulation.service is not None
    found = objects.condition_of(simulation.service, kind)
    return found["status"], found["reason"]


def groups(simulation: Simulation) -> dict[str, dict[str, Any]]:
    assert simulation.service is not None
    return {group["name"]: group for group in simulation.service["status"]["groups"]}


def revisions(simulation: Simulation) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for pod in simulation.pods.values():
        group = objects.label(pod, objects.LABEL_GROUP)
        if group:
            found.setdefault(group, set()).add(objects.label(pod, objects.LABEL_REVISION))
    return found


def watch(simulation: Simulation, seconds: int, check: Any = None) -> int:
    """Time passes; groups never mix revisions. The fewest ready groups seen."""
    fewest = 99
    for _ in range(seconds):
        simulation.reconcile()
        simulation.tick()
        for group, found in revisions(simulation).items():
            assert len(found) == 1, f"{group} has {found}"
        if simulation.service is not None:
            fewest = min(fewest, simulation.service["status"]["readyReplicas"])
        if check is not None:
            check()
    return fewest


def reasons(planned: Plan) -> list[str]:
    return [notice.reason for notice in planned.notices]


def test_a_new_service_is_written_in_order_and_becomes_ready() -> None:
    simulation = service(Simulation(), replicas=2)
    planned = simulation.plan()
    verbs = [write.verb for write in planned.writes]
    assert verbs[:3] == [Verb.CREATE] * 3 and set(verbs[3:]) == {Verb.APPLY}
    names = [(write.kind.name, write.name) for write in planned.writes]
    assert names.index(("Secret", "chat-secret")) < names.index(("Service", "chat-g0"))
    assert names.index(("Service", "chat-g0")) < names.index(("StatefulSet", "chat-g0"))
    assert planned.requeue_s is not None
    simulation.reconcile()
    assert condition(simulation, "Ready") == ("False", "TooFewGroups")
    assert condition(simulation, "Progressing")[0] == "True"
    simulation.settle()
    assert condition(simulation, "Ready") == ("True", "Serving")
    assert condition(simulation, "Progressing") == ("False", "Settled")
    assert condition(simulation, "Degraded") == ("False", "AsExpected")
    assert simulation.service is not None
    status = simulation.service["status"]
    assert status["summary"] == "2/2" and status["url"] == "http://chat-gateway.default.svc:8080"
    assert status["observedGeneration"] == 1 and status["model"] == "chat"
    assert groups(simulation)["chat-g0"]["nodes"] != ["", ""]


def test_a_leader_that_has_not_told_its_epoch_is_asked_again() -> None:
    """No event comes when it can answer."""
    simulation = settled()
    del groups(simulation)["chat-g0"]["epoch"]
    observed = replace(simulation.observe(), epochs={})
    planned = plan(observed, simulation.config, simulation.now, TOKENS)
    assert groups(simulation)["chat-g0"]["ready"] and planned.requeue_s == EPOCH_RETRY_S


def test_twenty_idle_reconciles_write_nothing() -> None:
    """o04."""
    simulation = settled(replicas=2)
    before = simulation.writes
    for _ in range(20):
        planned = simulation.reconcile()
        assert planned.idle and not planned.notices and planned.requeue_s is None
        simulation.tick()
    assert simulation.writes == before


def test_scale_up_and_down() -> None:
    simulation = settled()
    simulation.change(replicas=3)
    assert watch(simulation, 30) == 1  # the first group goes on serving
    assert groups(simulation).keys() == {"chat-g0", "chat-g1", "chat-g2"}
    simulation.change(replicas=1)
    planned = simulation.reconcile()
    drained = [(w.verb, w.name) for w in planned.writes]
    assert drained == [(Verb.PATCH, "chat-g1"), (Verb.PATCH, "chat-g2")]
    assert reasons(planned) == ["GroupDrains", "GroupDrains"]
    simulation.tick()
    simulation.reconcile()
    assert ("Service", "chat-g2") in simulation.objects  # until its pods are gone
    simulation.settle()
    assert groups(simulation).keys() == {"chat-g0"}
    left = {name for kind, name in simulation.objects if "-g1" in name or "-g2" in name}
    assert left == set()


def test_a_group_starts_anew_when_pods_and_their_controller_both_say_it_is_empty() -> None:
    """The watches of the two are in no order: pods that are not seen may still be there."""
    simulation = settled()
    simulation.change(podTemplate={"image": "next"})
    simulation.reconcile()  # stops it
    while any("-g0-" in name for name in simulation.pods):
        simulation.tick()
    simulation.tick()
    seen = simulation.observe()
    status = seen.objects["StatefulSet", "chat-g0"]["status"]
    for counted, starts in ((1, False), (0, True)):
        status["replicas"] = counted
        planned = plan(seen, simulation.config, simulation.now, TOKENS)
        assert ("chat-g0" in [w.name for w in planned.writes]) is starts


def test_scale_to_zero_and_back() -> None:
    simulation = settled()
    simulation.change(replicas=0)
    simulation.settle()
    assert condition(simulation, "Ready") == ("False", "ScaledToZero")
    assert not revisions(simulation)
    simulation.change(replicas=1)
    simulation.settle()
    assert condition(simulation, "Ready")[0] == "True"


@pytest.mark.parametrize("unavailable", [1, 2])
def test_a_rollout_replaces_whole_groups_within_its_budget(unavailable: int) -> None:
    simulation = settled(replicas=3, rollout={"maxUnavailable": unavailable})
    before = simulation.plan()
    assert before.idle
    simulation.change(podTemplate={"image": "next"})
    assert watch(simulation, 60) >= 3 - unavailable
    simulation.settle()
    images = {
        pod["spec"]["containers"][0]["image"]
        for pod in simulation.pods.values()
        if objects.label(pod, objects.LABEL_GROUP)
    }
    assert images == {"next"}


def test_a_rollout_leaves_gateways_enough_groups_that_they_know() -> None:
    """A new group is no replacement before the gateways, whose DNS is slow, can send to it."""
    simulation = service(Simulation(find_s=20.0), replicas=2)
    simulation.settle()
    simulation.change(podTemplate={"image": "next"})
    watch(simulation, 90, lambda: simulation.listed() or pytest.fail("gateways know no group"))
    simulation.settle()
    assert revisions(simulation)["chat-g0"] == revisions(simulation)["chat-g1"]


def held_rollout() -> Simulation:
    """The first of two groups is new, ready for a moment, and gateways have not found it."""
    simulation = service(Simulation(find_s=20.0), replicas=2)
    simulation.settle()
    simulation.change(podTemplate={"image": "next"})
    simulation.reconcile()
    for _ in range(60):
        simulation.tick()
        simulation.reconcile()
        if simulation.listed() == ["chat-g0"] and groups(simulation)["chat-g1"]["ready"]:
            return simulation
    raise AssertionError(simulation.summary())


def stops(simulation: Simulation, seen: Observed, now: float) -> tuple[list[str], Plan]:
    planned = plan(seen, simulation.config, now, TOKENS)
    sets = [w for w in planned.writes if w.kind is kinds.STATEFUL_SET]
    return [w.name for w in sets if w.body["spec"]["replicas"] == 0], planned


def test_a_rollout_waits_for_gateways_that_answer_and_for_no_others() -> None:
    simulation = held_rollout()
    (gateway,) = [p for p in simulation.pods.values() if "gateway" in objects.name_of(p)]
    uid, now = objects.uid_of(gateway), simulation.now
    for answers, expected in (
        ({uid: ["chat-g0"]}, []),
        ({uid: ["chat-g0", "chat-g1"]}, ["chat-g0"]),
        ({}, ["chat-g0"]),  # nobody could ask it
    ):
        found, planned = stops(simulation, replace(simulation.observe(), gateways=answers), now)
        assert found == expected
        assert planned.requeue_s is not None and planned.requeue_s <= POLL_S
        assert "GatewayBehind" not in reasons(planned)


def test_a_rollout_goes_on_without_a_gateway_that_never_finds_the_group() -> None:
    simulation = held_rollout()
    (gateway,) = [p for p in simulation.pods.values() if "gateway" in objects.name_of(p)]
    seen = replace(simulation.observe(), gateways={objects.uid_of(gateway): ["chat-g0"]})
    found, planned = stops(simulation, seen, simulation.now + 61)
    assert found == ["chat-g0"] and "GatewayBehind" in reasons(planned)
    # One that has just come has not had that time.
    born = objects.timestamp(simulation.now + 59)
    young = next(p for p in seen.pods if objects.uid_of(p) == objects.uid_of(gateway))
    young["metadata"]["creationTimestamp"] = born
    assert stops(simulation, seen, simulation.now + 61)[0] == []


def test_parallelism_is_rolled_out_too() -> None:
    simulation = settled(replicas=2)
    simulation.change(parallelism={"tensor": 2, "pipeline": 2, "ranksPerPod": 1})
    assert watch(simulation, 60) >= 1
    simulation.settle()
    assert sum(1 for pod in simulation.pods if pod.startswith("chat-g0-")) == 4


def test_a_bad_image_and_back() -> None:
    """o08: the bad revision stays with one group, says so, and going back needs nobody's help."""
    simulation = settled(replicas=2, rollout={"progressDeadlineSeconds": 30})
    simulation.bad_images.add("broken")
    simulation.change(podTemplate={"image": "broken"})
    assert watch(simulation, 60) == 1
    assert condition(simulation, "Degraded") == ("True", "ImagePullFailed")
    assert condition(simulation, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert condition(simulation, "Ready")[0] == "True"
    assert "broken" in groups(simulation)["chat-g1"]["message"]
    simulation.delete_pod("chat-g0-1")  # the healthy group is away for a moment
    watch(simulation, 20)
    assert groups(simulation)["chat-g0"]["ready"], "it was drawn into the bad revision"
    simulation.change(podTemplate={})
    assert watch(simulation, 30) == 1
    simulation.settle()
    assert condition(simulation, "Degraded") == ("False", "AsExpected")


def test_a_bad_image_with_one_replica_and_back() -> None:
    simulation = settled()
    simulation.bad_images.add("broken")
    simulation.change(podTemplate={"image": "broken"})
    watch(simulation, 20)
    assert condition(simulation, "Ready")[0] == "False"
    simulation.change(podTemplate={})
    simulation.settle()
    assert condition(simulation, "Ready")[0] == "True"


def test_a_pod_that_was_replaced_unseen_is_the_groups_own_business() -> None:
    """o01: it has the old name and a new UID; the ranks meet again, the operator only watches."""
    simulation = settled()
    before = objects.uid_of(simulation.pods["chat-g0-1"])
    writes = simulation.writes
    simulation.delete_pod("chat-g0-1")
    for _ in range(6):
        simulation.tick()  # the operator does not look
    assert objects.uid_of(simulation.pods["chat-g0-1"]) != before
    watch(simulation, 10)
    assert groups(simulation)["chat-g0"]["ready"]
    # Statuses, no object: the group forms, gateways look for it, it serves.
    assert simulation.writes - writes <= 3


def test_pods_of_a_lost_node_are_deleted_by_force_after_the_bound() -> None:
    simulation = settled(recovery={"lostNodeSeconds": 20})
    node = simulation.pods["chat-g0-1"]["spec"]["nodeName"]
    old = objects.uid_of(simulation.pods["chat-g0-1"])
    simulation.lose(node)
    watch(simulation, 10)
    assert objects.uid_of(simulation.pods["chat-g0-1"]) == old
    assert condition(simulation, "Degraded") == ("True", "NodeLost")
    watch(simulation, 12)
    assert objects.uid_of(simulation.pods["chat-g0-1"]) != old
    watch(simulation, 20)
    assert groups(simulation)["chat-g0"]["ready"]
    assert simulation.pods["chat-g0-1"]["spec"]["nodeName"] != node
    simulation.restore(node)
    simulation.settle()


def test_a_force_deletion_names_the_pod_that_was_seen() -> None:
    simulation = settled(recovery={"lostNodeSeconds": 5})
    simulation.lose(simulation.pods["chat-g0-1"]["spec"]["nodeName"])
    simulation.tick(6)
    forced = [w for w in simulation.plan().writes if w.kind is kinds.POD]
    assert forced and all(w.force and w.uid and w.version for w in forced)
    assert {w.uid for w in forced} <= {objects.uid_of(p) for p in simulation.pods.values()}


def test_half_scheduled_groups_make_room_for_each_other() -> None:
    """Two groups of two and room for three pods beside Redis: one holds room in vain."""
    simulation = service(
        Simulation(capacity={"n1": 4}), replicas=2, recovery={"incompleteGroupSeconds": 30}
    )
    watch(simulation, 25)
    assert sum(group["ready"] for group in groups(simulation).values()) <= 1
    said: list[str] = []
    for _ in range(120):
        said += reasons(simulation.reconcile())
        simulation.tick()
    assert "GroupReleased" in said
    assert simulation.service is not None
    assert simulation.service["status"]["readyReplicas"] == 1
    simulation.capacity["n2"] = 10
    simulation.run(1000, step=20)
    assert simulation.service["status"]["readyReplicas"] == 2
    simulation.settle()


def test_deletion_in_any_state_leaves_nothing() -> None:
    for ticks in (0, 1, 4, 20):
        simulation = service(Simulation(), replicas=2)
        for _ in range(ticks):
            simulation.reconcile()
            simulation.tick()
        simulation.reconcile()
        simulation.delete()
        for _ in range(10):
            simulation.reconcile()
            simulation.tick()
        assert not simulation.objects and not simulation.pods and not simulation.secrets


def test_a_service_that_is_being_deleted_is_left_alone() -> None:
    simulation = settled()
    assert simulation.service is not None
    simulation.service["metadata"]["deletionTimestamp"] = objects.timestamp(simulation.now)
    simulation.objects.clear()
    assert simulation.plan() == Plan()


def test_secrets_are_made_once() -> None:
    simulation = settled()
    uids = {name: objects.uid_of(secret) for name, secret in simulation.secrets.items()}
    simulation.change(replicas=2, podTemplate={"image": "next"})
    simulation.settle()
    assert {n: objects.uid_of(s) for n, s in simulation.secrets.items()} == uids
    assert len(TOKENS) == 4


def test_a_name_that_somebody_else_has_is_not_taken_over() -> None:
    simulation = service(Simulation())
    simulation.objects["Service", "chat-gateway"] = {
        "kind": "Service",
        "metadata": {"name": "chat-gateway", "namespace": "default", "uid": "other"},
        "spec": {},
    }
    planned = simulation.reconcile()
    assert ("Service", "chat-gateway") not in [(w.kind.name, w.name) for w in planned.writes]
    assert condition(simulation, "Degraded") == ("True", "NameTaken")
    del simulation.objects["Service", "chat-gateway"]
    simulation.settle()


def test_a_service_of_the_same_name_waits_for_the_one_before_to_go() -> None:
    simulation = settled()
    simulation.create("chat", {"model": MODEL, "parallelism": PAIR})  # deleted and made anew
    planned = simulation.plan()
    assert not planned.writes
    simulation.settle()
    assert condition(simulation, "Ready")[0] == "True"


def test_missing_secrets_are_named() -> None:
    keys = {"apiKeysSecretRef": {"name": "mine", "key": "k"}}
    simulation = service(Simulation(), gateway=keys)
    simulation.reconcile()
    assert condition(simulation, "Degraded") == ("True", "SecretMissing")
    assert simulation.service is not None
    assert simulation.service["status"]["apiKeysSecret"] == "mine"


def test_a_change_of_the_api_keys_rolls_the_gateways_out() -> None:
    simulation = service(Simulation(), gateway={"apiKeysSecretRef": {"name": "mine"}})
    metadata = {"name": "mine", "uid": "s", "resourceVersion": "1"}
    simulation.secrets["mine"] = {"metadata": metadata, "keys": ["keys"]}
    simulation.settle()
    metadata["resourceVersion"] = "2"
    assert [write.name for write in simulation.plan().writes] == ["chat-gateway"]


def test_a_spec_that_cannot_work_is_told_and_nothing_is_touched() -> None:
    simulation = settled()
    assert simulation.service is not None
    simulation.service["spec"]["parallelism"] = {"tensor": 2, "pipeline": 2, "ranksPerPod": 3}
    planned = simulation.reconcile()
    assert not planned.writes and reasons(planned)
    assert condition(simulation, "Degraded") == ("True", "InvalidSpec")
    message = objects.condition_of(simulation.service, "Ready")["message"]
    assert "divisor of 4" in message
    assert simulation.reconcile().idle
    simulation.service["spec"]["engine"] = {"maxRunning": "many"}
    simulation.reconcile()
    message = objects.condition_of(simulation.service, "Ready")["message"]
    assert "spec.engine.maxRunning" in message


def test_what_the_engine_refuses_is_told_in_its_words() -> None:
    simulation = settled()
    ended = {"exitCode": 2, "message": "warning\nThere is no model at /models/x"}
    pod = simulation.pods["chat-g0-0"]
    pod["status"]["containerStatuses"] = [
        {
            "ready": False,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
    ]
    simulation.reconcile()
    assert condition(simulation, "Degraded") == ("True", "SettingsRefused")
    assert "There is no model at /models/x" in groups(simulation)["chat-g0"]["message"]


def test_a_leader_that_is_in_no_epoch_makes_its_group_unready() -> None:
    simulation = settled()
    observed = simulation.observe()
    leader = objects.uid_of(simulation.pods["chat-g0-0"])
    for epoch, ready in ((None, 0), (77, 1)):
        seen = replace(observed, epochs={leader: epoch})
        status = plan(seen, simulation.config, simulation.now, TOKENS).status
        assert status is not None and status["readyReplicas"] == ready
    assert status["groups"][0]["epoch"] == 77


def test_ready_means_that_a_gateway_has_found_a_group() -> None:
    simulation = settled()
    gateway = next(p for p in simulation.pods.values() if "gateway" in objects.name_of(p))
    seen = replace(simulation.observe(), gateways={objects.uid_of(gateway): []})
    status = plan(seen, simulation.config, simulation.now, TOKENS).status
    assert status is not None
    assert status["conditions"][0]["reason"] == "GatewayNotReady"


def test_gateways_belong_to_an_autoscaler_unless_their_number_is_given() -> None:
    simulation = settled()
    deployment = simulation.objects["Deployment", "chat-gateway"]
    deployment["spec"]["replicas"] = 4
    simulation.settle()
    assert deployment["spec"]["replicas"] == 4
    simulation.change(gateway={"replicas": 2})
    simulation.settle()
    assert simulation.objects["Deployment", "chat-gateway"]["spec"]["replicas"] == 2


def test_what_somebody_edits_is_put_right() -> None:
    simulation = settled()
    simulation.objects["Service", "chat-leaders"]["spec"]["selector"] = {"a": "b"}
    del simulation.objects["PodDisruptionBudget", "chat-groups"]
    names = {write.name for write in simulation.plan().writes}
    assert names == {"chat-leaders", "chat-groups"}
    simulation.settle()


def test_a_redis_of_the_users_own_takes_over() -> None:
    simulation = settled()
    assert ("Deployment", "chat-redis") in simulation.objects
    simulation.secrets["bus"] = {"metadata": {"name": "bus"}, "keys": ["url"]}
    simulation.change(redis={"urlSecretRef": {"name": "bus"}})
    simulation.settle()
    assert ("Deployment", "chat-redis") not in simulation.objects


def test_writes_that_the_api_server_refuses_are_told() -> None:
    simulation = settled()
    seen = replace(simulation.observe(), refused=["apply StatefulSet chat-g0: quota exceeded"])
    status = plan(seen, simulation.config, simulation.now, TOKENS).status
    assert status is not None
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    assert degraded["reason"] == "WriteRefused" and "quota" in degraded["message"]
