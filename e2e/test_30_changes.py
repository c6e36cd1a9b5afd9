"""Scaling, rollouts and drained nodes under load: no request ends without a reason."""

from collections.abc import Iterator

import pytest
from support.operator import REPO, SYSTEM, Operator, installed_by_helm
from support.progress import wait_for
from support.service import READY_S, Load, Service, shared_service
from support.stack import Cluster, Namespace, new_namespace

SMALL = {"tensor": 1, "pipeline": 1, "ranksPerPod": 1}


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[Operator]:
    """Here it is the chart's, installed by helm."""
    with installed_by_helm(cluster) as found:
        yield found


@pytest.fixture(scope="module")
def space(cluster: Cluster, operator: Operator) -> Iterator[Namespace]:
    with new_namespace(cluster, "changes") as made:
        yield made


@pytest.fixture
def service(space: Namespace, request: pytest.FixtureRequest) -> Iterator[Service]:
    with shared_service(space, "chat", request.node, parallelism=SMALL) as found:
        yield found


def test_scale_up_and_down_under_load(service: Service) -> None:
    with Load(service) as load:
        service.kubectl("scale", "sinf/chat", "--replicas=2")
        wait_for("two groups are ready", lambda: len(service.epochs()) == 2, READY_S, every=1.0)
        served = len(load.ends)
        wait_for("the load goes on", lambda: len(load.ends) > served + 2, 60)
        service.kubectl("scale", "sinf/chat", "--replicas=1")
        wait_for("one group is left", lambda: len(service.engine_pods()) == 1, 90, every=1.0)
        service.wait_settled()
    load.assert_everybody_was_told()
    service.assert_idle()


def test_a_rollout_under_load(service: Service, cluster: Cluster) -> None:
    before = service.status["revision"]
    with Load(service) as load:
        service.patch({"podTemplate": {"image": cluster.images.engine_next}})
        service.wait_settled(200)
        assert service.status["revision"] != before
        served = len(load.ends)
        wait_for("the load goes on", lambda: len(load.ends) > served + 2, 60)
    load.assert_everybody_was_told()
    (pod,) = service.engine_pods()
    assert pod["spec"]["containers"][0]["image"] == cluster.images.engine_next
    service.assert_idle()


def test_case_o08_a_rollout_to_a_bad_image_and_back(service: Service, cluster: Cluster) -> None:
    service.patch({"podTemplate": {"image": "localhost/there-is-no-such:image"}})

    def says_so() -> bool:
        return any(
            "image" in (c.get("message", "") + c.get("reason", "")).lower()
            for c in service.status.get("conditions", ())
            if c["type"] != "Ready" or c["status"] == "False"
        )

    wait_for("a condition says that the image is the matter", says_so, 90, every=1.0)
    service.patch({"podTemplate": {"image": cluster.images.engine}})
    service.wait_settled(200)
    assert "Paris" in service.capital()


def test_kubectl_drain_finishes_with_one_replica(service: Service) -> None:
    (pod,) = service.engine_pods()
    node = pod["spec"]["nodeName"]
    stream = service.stream().running()
    try:
        service.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s",
            "--pod-selector=app.kubernetes.io/component=engine",
        )  # fmt: skip
        assert stream.ended().reason == "drain"
    finally:
        service.kubectl("uncordon", node)
    # What the operator last said of it may be older than the drain.
    wait_for("it answers", service.answers, READY_S, every=1.0)
    service.wait_ready()


def test_the_chart_is_clean_and_says_what_next(cluster: Cluster, operator: Operator) -> None:
    chart = str(REPO / "charts" / "stopway")
    cluster.kubectl.helm("lint", "--strict", chart)
    notes = cluster.kubectl.helm("get", "notes", "stopway", "--namespace", SYSTEM)
    assert "kubectl apply" in notes, notes
