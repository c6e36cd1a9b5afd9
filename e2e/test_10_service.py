"""A service from `kubectl apply` to its end: Ready, chat, a stop with its trace, and what must go.

One service of two tensor-parallel ranks on two nodes serves all tests of this file.
"""

import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.jaeger import Jaeger, Trace
from support.kubectl import KubectlError, name_of
from support.operator import Operator
from support.progress import stays, wait_for
from support.service import READY_S, Service, apply_service, left_of, shared_service, spec
from support.stack import Cluster, Namespace, new_namespace

PHASES = ("stop.notice", "stop.in_flight", "stop.reclaim", "stop.handoff")


@pytest.fixture(scope="module")
def space(cluster: Cluster, operator: Operator) -> Iterator[Namespace]:
    with new_namespace(cluster, "service") as made:
        yield made


@pytest.fixture
def service(space: Namespace, jaeger: Jaeger, request: pytest.FixtureRequest) -> Iterator[Service]:
    tracing = {"otlpEndpoint": jaeger.otlp_endpoint}
    with shared_service(space, "chat", request.node, tracing=tracing) as found:
        yield found


def test_apply_makes_it_ready_and_it_answers(service: Service) -> None:
    assert "Paris" in service.capital()
    service.epoch()  # Ready may be said before its leader has been asked
    status = service.status
    assert status["replicas"] == status["readyReplicas"] == 1
    assert status["model"] == "smollm2-135m-instruct" and service.gateway in status["url"]
    (group,) = status["groups"]
    assert group["epoch"] > 0 and group["ready"]
    assert len(set(service.nodes().values())) == 2, "its two pods are on two nodes"
    row = service.kubectl("get", "sinf", "chat")
    for column in ("READY", "GROUPS", "MODEL", "URL", "AGE", "True", "1/1"):
        assert column in row, row


def test_a_cancel_is_reclaimed_on_every_rank_and_is_one_trace(
    service: Service, jaeger: Jaeger
) -> None:
    stream = service.stream().running()
    receipt = service.cancel(stream.seen.uid)
    seen = stream.ended()
    assert (seen.finish_reason, seen.stop_reason) == ("abort", "client_cancel")
    assert receipt["status"] == "reclaimed" and not receipt["pending_on"]
    (group,) = receipt["groups"]
    nodes = list(service.nodes().values())
    assert [(part["rank"], part["node"]) for part in group["ranks"]] == list(enumerate(nodes))
    jaeger.wait_for_spans(receipt["trace_id"], ["stop", "stop.notify", *PHASES])

    def of_both_ranks() -> Trace | None:
        found = jaeger.trace(receipt["trace_id"])
        ranks = [found.values(phase, "stopway.rank") for phase in PHASES] if found else []
        return found if ranks and all(each == {0, 1} for each in ranks) else None

    trace = wait_for("each phase is there of both ranks", of_both_ranks, 30)
    for phase in PHASES:
        assert len(trace.named(phase)) == 2, trace.outline()
        assert trace.values(phase, "stopway.node") == set(nodes), trace.outline()
    (notify,) = trace.named("stop.notify")
    assert {span.name for span in trace.children(notify)} >= set(PHASES), trace.outline()
    # t07: whatever the clocks say, the turns say what came first.
    for span in trace.named("stop.in_flight"):
        tags = span.tags
        assert tags["stopway.turn.noticed"] <= tags["stopway.turn.effective"]
    service.assert_idle()


def test_a_disconnect_frees_all(service: Service) -> None:
    stream = service.stream().running()
    stream.disconnect()

    def receipt() -> dict[str, Any] | None:
        stop_ids = service.request(stream.seen.uid)["stop_ids"]
        return service.stop(stop_ids[0]) if stop_ids else None

    wait_for(
        "the disconnect is reclaimed",
        lambda: (receipt() or {}).get("status") == "reclaimed",
        30,
    )
    service.assert_idle()


def test_case_o04_idle_reconciles_write_nothing(
    service: Service, operator: Operator, space: Namespace
) -> None:
    """A new operator that looks at everything each second, twenty times, writes not once."""
    kinds = "sinf,statefulsets,deployments,services,secrets,networkpolicies,pdb"

    def versions() -> str:
        return space.kubectl(
            "get", kinds, "-o", "jsonpath={range .items[*]}{.kind}/{.metadata.name} "
            "{.metadata.resourceVersion}{'\\n'}{end}",
        )  # fmt: skip

    def settled() -> str:
        """The versions, when nothing has changed for a while."""
        seen = versions()
        stays("nothing is written", lambda: versions() == seen, 5, every=1.0)
        return seen

    before = wait_for("what the tests before have begun is over", settled, 60)
    operator.set_env("STOPWAY_OPERATOR_RESYNC_S=1")
    try:
        wait_for("twenty reconciles", lambda: operator.metric("reconciles_total") >= 20, 90)
        assert operator.metric("api_writes_total") == 0
        assert versions() == before
    finally:
        operator.set_env("STOPWAY_OPERATOR_RESYNC_S-")


def test_a_killed_operator_resumes(service: Service, operator: Operator) -> None:
    """It dies as soon as it has begun, three times, and the scale-up comes about all the same."""
    service.kubectl("scale", "sinf/chat", "--replicas=2")
    for _ in range(3):
        time.sleep(0.5)  # some moment, not a condition: it may be killed at any
        operator.kill()
        operator.wait()
    wait_for("two groups are ready", lambda: len(service.epochs()) == 2, READY_S, every=1.0)
    service.wait_settled()
    service.kubectl("scale", "sinf/chat", "--replicas=1")
    wait_for("one group is left", lambda: len(service.engine_pods()) == 2, 90, every=1.0)
    service.wait_settled()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallelism": {"tensor": 2, "pipeline": 1, "ranksPerPod": 3}}, "ranksPerPod"),
        ({"model": {"uri": "s3://bucket/model"}}, "uri"),
        ({"replicas": -1}, "replicas"),
        ({"stop": {"policy": "never"}}, "policy"),
    ],
    ids=["ranks-per-pod", "uri", "replicas", "policy"],
)
def test_a_bad_spec_is_refused_by_the_api_server(
    space: Namespace, operator: Operator, changes: dict[str, Any], words: str
) -> None:
    try:
        with pytest.raises(KubectlError, match=words):
            apply_service(space, "bad", **changes)
    finally:
        space.kubectl.delete("inferenceservice", "bad")


def test_a_spec_that_cannot_work_gets_a_condition_that_says_why(
    space: Namespace, operator: Operator
) -> None:
    uncut = {"tensor": 5, "pipeline": 1, "ranksPerPod": 5}
    bad = apply_service(space, "uncut", parallelism=uncut)

    def says_why() -> bool:
        conditions = bad.status.get("conditions", ())
        return any("tensor parallelism 1, 2, 3" in c.get("message", "") for c in conditions)

    wait_for("a condition with the engine's own words", says_why, 90, every=1.0)
    assert not bad.is_ready()
    space.kubectl.delete("sinf", "uncut")
    wait_for("nothing of it is left", lambda: _of(space, "uncut") == [], 60, every=1.0)


def test_keys_are_needed(service: Service) -> None:
    with service.namespace.http(f"svc/{service.gateway}", 8080) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/healthz").status_code == 200
        wrong = {"Authorization": "Bearer " + base64.b64encode(b"no").decode()}
        assert client.get("/v1/models", headers=wrong).status_code == 401


@pytest.mark.parametrize("when", ["at once", "while it starts", "ready"])
def test_deletion_in_any_state_leaves_nothing(
    cluster: Cluster, operator: Operator, namespace: Namespace, when: str
) -> None:
    made = apply_service(namespace, "short", parallelism=spec()["parallelism"])
    if when == "while it starts":
        wait_for("its pods are there", lambda: len(made.engine_pods()) == 2, 60)
    elif when == "ready":
        made.wait_ready()
        made.stream().running()
    namespace.kubectl.delete("sinf", "short", "--wait=false")
    wait_for("nothing is left", lambda: left_of(namespace) == [], 90, every=1.0)
    assert namespace.kubectl.find("inferenceservice", "short") is None


def test_case_o07_the_namespace_goes_with_the_operator_away(
    cluster: Cluster, operator: Operator
) -> None:
    try:
        with new_namespace(cluster, "orphan") as orphan:
            made = apply_service(orphan, "orphan")
            wait_for("its pods are there", lambda: len(made.engine_pods()) == 2, 60)
            operator.scale(0)
        assert cluster.kubectl.find("namespace", orphan.name) is None
    finally:
        operator.scale(1)
        operator.wait()


def _of(space: Namespace, name: str) -> list[str]:
    return [
        found
        for kind in ("statefulsets", "deployments", "services", "pods")
        for found in (name_of(o) for o in space.kubectl.objects(kind))
        if found.startswith(f"{name}-")
    ]
