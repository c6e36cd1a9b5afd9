"""Pods, ranks, nodes, links and Redis fail while requests run.

Every request ends with a reason, the group comes back as one under a new epoch, nothing is held.
"""

from collections.abc import Callable, Iterator

import pytest
from support.faults import Faults
from support.kubectl import Object, is_ready, name_of, node_of
from support.operator import Operator
from support.progress import wait_for
from support.service import Service, shared_service
from support.stack import Cluster, Namespace, new_namespace


@pytest.fixture(scope="module")
def space(cluster: Cluster, operator: Operator) -> Iterator[Namespace]:
    with new_namespace(cluster, "faults") as made:
        yield made


@pytest.fixture
def service(space: Namespace, request: pytest.FixtureRequest) -> Iterator[Service]:
    with shared_service(space, "chat", request.node) as found:
        yield found


def lose(service: Service, fault: Callable[[], object], *, reasons: tuple[str, ...]) -> None:
    """Break something under a stream; see it end, the group come back and the books balance."""
    before = service.epoch()
    stream = service.stream().running()
    fault()
    seen = stream.ended(60)
    assert seen.reason in reasons, seen
    # A client whose stream is cut is told at once, and how its request ended may be known later.
    outcome = wait_for("its outcome", lambda: service.request(seen.uid)["outcome"], 30)
    # One that drains may be lost before it has said that it stopped.
    assert outcome == "failed" or (seen.reason, outcome) == ("drain", "stopped"), (seen, outcome)
    come_back(service, before)


def come_back(service: Service, before: int) -> int:
    """Wait until the group serves in a new epoch, with nothing held; which epoch that is."""
    epoch = service.epoch(after=before)
    wait_for("it answers", service.answers, 60, every=1.0)
    service.assert_idle()
    return epoch


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(service: Service, rank: int) -> None:
    pod = list(service.nodes())[rank]
    lose(service, lambda: service.kill_rank(pod), reasons=("rank_lost",))


@pytest.mark.parametrize("rank", [0, 1])
def test_case_o01_a_pod_deleted_at_once_comes_back_under_its_name(
    service: Service, rank: int
) -> None:
    pod = list(service.nodes())[rank]
    uid = service.engine_pods()[rank]["metadata"]["uid"]
    gone = ("--force", "--grace-period=0", "--wait=false")
    lose(
        service,
        lambda: service.kubectl.delete("pod", pod, *gone),
        reasons=("rank_lost", "drain"),
    )
    assert service.engine_pods()[rank]["metadata"]["uid"] != uid


@pytest.mark.parametrize("rank", [0, 1])
def test_case_o06_a_pod_deleted_gently_drains(service: Service, rank: int) -> None:
    """SIGTERM on any rank's pod: the whole group drains, and the client is told why."""
    before = service.epoch()
    stream = service.stream().running()
    pod = list(service.nodes())[rank]
    service.kubectl.delete("pod", pod, "--wait=false")
    seen = stream.ended(60)
    assert seen.reason == "drain", seen
    (stop_id,) = service.request(seen.uid)["stop_ids"]
    # The client is told at once; what was in flight then takes a step or two to come back.
    wait_for("its blocks are back", lambda: service.stop(stop_id)["status"] == "reclaimed", 20)
    receipt = service.stop(stop_id)
    assert receipt["reason"] == "drain", receipt
    ranks = receipt["groups"][0]["ranks"]
    assert [part["rank"] for part in ranks] == [0, 1]
    assert all(part["reclaimed_at"] for part in ranks), receipt
    epoch = come_back(service, before)
    # By the ranks themselves: what the end of an epoch proves is known when the next one begins.
    assert all(part["reclaimed_at"] < epoch / 1000 for part in ranks), receipt


def test_a_paused_group_is_paused_in_a_new_pod(service: Service) -> None:
    """Its address is another: it is the group that the gateway remembers."""
    before = service.epoch()
    service.say_mode("pause", mode="wait")
    service.kubectl.delete("pod", next(iter(service.nodes())), "--wait=false")
    service.epoch(after=before)
    wait_for("and its gateway sees it paused", lambda: service.is_serving("wait"), 30)
    service.say_mode("resume")
    wait_for("it answers", service.answers, 60, every=1.0)
    service.assert_idle()


def victim(service: Service) -> str:
    """A node of an engine pod that is not the gateway's: its clients would see only silence."""
    (gateway,) = service.kubectl.pods(
        f"app.kubernetes.io/instance={service.name},app.kubernetes.io/component=gateway"
    )
    nodes = [node for node in service.nodes().values() if node != node_of(gateway)]
    return nodes[-1]


def test_a_frozen_node(service: Service, faults: Faults) -> None:
    node = victim(service)
    before = service.epoch()
    stream = service.stream().running()
    faults.freeze(node)
    assert stream.ended(60).reason == "rank_lost"
    faults.thaw(node)
    faults.wait_ready(node)
    come_back(service, before)


def test_a_node_that_is_powered_off(service: Service, faults: Faults) -> None:
    """Its pod is lost with it, and is made again elsewhere (or there, when it is back)."""
    node = victim(service)
    before = service.epoch()
    stream = service.stream().running()
    faults.power_off(node)
    assert stream.ended(60).reason == "rank_lost"
    come_back(service, before)
    assert node not in service.nodes().values(), "it is not waited for"
    faults.power_on(node)
    faults.wait_ready(node)


def test_a_partition_between_the_ranks(service: Service, faults: Faults) -> None:
    one, other = service.nodes().values()
    before = service.epoch()
    stream = service.stream().running()
    faults.cut_between(one, other)
    assert stream.ended(60).reason == "rank_lost"
    faults.mend(one)
    faults.mend(other)
    come_back(service, before)


def redis_selector(service: Service) -> str:
    return f"app.kubernetes.io/instance={service.name},app.kubernetes.io/component=redis"


def ready_redis(service: Service) -> Object:
    """Its Redis pod, once there is one that is ready."""

    def found() -> Object | None:
        (pod,) = service.kubectl.pods(redis_selector(service))
        return pod if is_ready(pod) else None

    pod = wait_for("Redis is ready", found, 60)
    assert pod is not None
    return pod


def test_redis_restarted_loses_no_stop(service: Service) -> None:
    stream = service.stream().running()
    gone = ("--force", "--grace-period=0", "--wait=false")
    service.kubectl.delete("pod", name_of(ready_redis(service)), *gone)
    receipt = service.cancel(stream.seen.uid)
    assert receipt["status"] == "reclaimed"
    assert stream.ended().stop_reason == "client_cancel"
    ready_redis(service)
    stream = service.stream().running()
    assert service.cancel(stream.seen.uid)["status"] == "reclaimed"
    stream.ended()
    service.assert_idle()


def put_redis_apart(service: Service) -> None:
    """Move Redis away from the ranks' nodes, if it is on one: what is cut is between nodes."""
    ranks = set(service.nodes().values())
    pod = ready_redis(service)
    if node_of(pod) not in ranks:
        return
    try:
        service.kubectl("cordon", *ranks)
        service.kubectl.delete("pod", name_of(pod))
        assert node_of(ready_redis(service)) not in ranks
    finally:
        service.kubectl("uncordon", *ranks)


def test_redis_partitioned_from_a_node_loses_no_stop(service: Service, faults: Faults) -> None:
    put_redis_apart(service)
    for node in set(service.nodes().values()):
        stream = service.stream().running()
        faults.cut_from_pods(node, service.kubectl, redis_selector(service))
        receipt = service.cancel(stream.seen.uid)
        assert receipt["status"] == "reclaimed", receipt
        assert [part["rank"] for part in receipt["groups"][0]["ranks"]] == [0, 1]
        assert stream.ended().stop_reason == "client_cancel"
        faults.mend(node)
    service.assert_idle()
