"""The test cluster itself: what the other tests take for granted, and nothing of Stopway."""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.faults import Faults
from support.jaeger import Jaeger
from support.kubectl import KubectlError, is_ready, name_of, node_of
from support.progress import stays, wait_for
from support.stack import Cluster, Namespace, new_namespace

PORT = 8080

# Says who it is, streams, becomes ready when told to, and drains for a second.
SERVER = """
import http.server, os, signal, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/ready":
            self.send_response(200 if os.path.exists("/tmp/ready") else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        count = int(self.path.removeprefix("/stream/")) if "stream" in self.path else 1
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for i in range(count):
                line = f"{os.environ['HOSTNAME']} {i}\\n".encode()
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(line), line))
                if count > 1: time.sleep(0.2)
            self.wfile.write(b"0\\r\\n\\r\\n")
        except OSError as error:
            print("client gone:", error, flush=True)
            self.close_connection = True
    def log_message(self, *args): pass
def stop(*_):
    print("SIGTERM: draining", flush=True)
    threading.Timer(1, lambda: (print("drained", flush=True), os._exit(0))).start()
signal.signal(signal.SIGTERM, stop)
print("serving as", os.environ["HOSTNAME"], flush=True)
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""

ALL_REDUCE = """
import os, signal, torch, torch.distributed as dist
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
rank = int(os.environ["HOSTNAME"].rsplit("-", 1)[1])
dist.init_process_group("gloo", init_method="tcp://rank-0.rank:29500", rank=rank, world_size=3)
x = torch.full((4,), rank + 1.0)
dist.all_reduce(x)
print("sum", x.tolist(), flush=True)
open("/tmp/ready", "w")
signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture(scope="module")
def web(cluster: Cluster) -> Iterator[Namespace]:
    """Three servers, one a node, none ready until it is told to be."""
    with new_namespace(cluster, "web") as made:
        ready = {"httpGet": {"path": "/ready", "port": PORT}, "periodSeconds": 1}
        command = ["python3", "-c", SERVER]
        made.kubectl.apply(
            [
                *_group("web", cluster.images.python, command, {"readinessProbe": ready}),
                _service("front", "web"),
                _service("ready-only", "web", clusterIP="None"),
            ]
        )
        _wait_running(made, "web")
        yield made


@pytest.fixture
def serving(web: Namespace) -> Namespace:
    """`web`, all three ready, whatever has become of them before."""

    def ready() -> bool:
        pods = web.kubectl.pods("app=web")
        for pod in pods:
            if not is_ready(pod):
                web.kubectl.exec(name_of(pod), "touch", "/tmp/ready")
        return len(pods) == 3 and all(is_ready(pod) for pod in pods)

    wait_for("all three are ready", ready, 120)
    return web


def test_nodes_are_ready(cluster: Cluster) -> None:
    assert len(cluster.nodes) >= 3
    assert all(cluster.kubectl.node_ready(node) == "True" for node in cluster.nodes)


def test_pods_run_on_three_nodes_and_have_logs(web: Namespace) -> None:
    pods = web.kubectl.pods("app=web")
    assert len({node_of(pod) for pod in pods}) == 3
    wait_for("its log", lambda: "serving as web-0" in web.kubectl.logs("web-0"), 30)


def test_dns_has_pods_that_are_not_ready_where_that_is_asked_for(web: Namespace) -> None:
    assert not any(is_ready(pod) for pod in web.kubectl.pods("app=web"))
    wait_for("web-2 is reached by name", lambda: _get(web, "web-0", "http://web-2.web:8080"), 60)
    with pytest.raises(KubectlError):
        web.kubectl.exec("web-0", "getent", "hosts", "ready-only")


def test_a_service_reaches_pods_of_all_nodes(serving: Namespace) -> None:
    many = "for i in $(seq 20); do curl -sf -m 2 http://front:8080 | cut -d' ' -f1; done"

    def from_a_pod() -> bool:
        return len(set(serving.kubectl.exec("web-0", "sh", "-c", many).split())) == 3

    def from_the_test() -> bool:
        return len({_serves(serving, "svc/front").split()[0] for _ in range(20)}) == 3

    wait_for("a pod reaches all three through the Service", from_a_pod, 30)
    if serving.cluster.is_own:  # a port-forward leads to one of them
        wait_for("the test reaches all three through the Service", from_the_test, 30)


def test_a_stream_arrives_piece_by_piece(serving: Namespace) -> None:
    with serving.http("svc/front", PORT) as client, client.stream("GET", "/stream/20") as reply:
        times = [time.monotonic() for _ in reply.iter_lines()]
    assert len(times) == 20
    assert times[-1] - times[0] > 1, "four seconds of it came all at once"


async def test_streams_run_side_by_side(serving: Namespace) -> None:
    async with serving.async_http("svc/front", PORT) as client:

        async def read() -> int:
            async with client.stream("GET", "/stream/15") as reply:
                return len([line async for line in reply.aiter_lines()])

        start = time.monotonic()
        assert await asyncio.gather(*(read() for _ in range(8))) == [15] * 8
        assert time.monotonic() - start < 15, "24 s of streams, one after the other"


def test_a_pod_sees_that_its_client_has_gone(serving: Namespace) -> None:
    with serving.http("pod/web-1", PORT) as client, client.stream("GET", "/stream/100") as reply:
        next(reply.iter_lines())
    wait_for("web-1 noticed", lambda: "client gone" in serving.kubectl.logs("web-1"), 30)


def test_a_forwarded_port_leads_into_the_cluster(serving: Namespace) -> None:
    port = serving.forward("svc/front", PORT)
    assert "web-" in httpx.get(f"http://127.0.0.1:{port}/", timeout=10).text


def test_draining_a_node_lets_a_stream_end(serving: Namespace, cluster: Cluster) -> None:
    kubectl = serving.kubectl
    pod = kubectl.get("pod", "web-2")
    with serving.http("pod/web-2", PORT) as client, client.stream("GET", "/stream/3") as reply:
        lines = reply.iter_lines()
        next(lines)
        try:
            cluster.kubectl(
                *("drain", node_of(pod), "--ignore-daemonsets", "--delete-emptydir-data"),
                *("--pod-selector=app=web", "--timeout=60s"),
            )
        finally:
            cluster.kubectl("uncordon", node_of(pod))
        assert len(list(lines)) == 2, "SIGTERM cut the stream"
    wait_for("web-2 is back", lambda: _is_another(serving, "web-2", pod), 60)
    kubectl.exec("web-2", "touch", "/tmp/ready")
    kubectl.wait_ready("web-2")


def test_torch_reduces_over_three_nodes(cluster: Cluster, namespace: Namespace) -> None:
    if cluster.venv_python is None:
        pytest.skip("the images of a cluster of KUBECONFIG bring their own Python")
    command = [cluster.venv_python, "-u", "-c", ALL_REDUCE]
    ready = {"exec": {"command": ["cat", "/tmp/ready"]}, "periodSeconds": 1}
    namespace.kubectl.apply(
        _group("rank", cluster.images.engine, command, {"readinessProbe": ready})
    )
    for i in range(3):
        namespace.kubectl.wait_ready(f"rank-{i}", 150)
        wait_for(f"the sum in the log of rank {i}", lambda i=i: _summed(namespace, i), 30)  # type: ignore[misc]


def test_stopway_is_installed_for_its_pods(cluster: Cluster, namespace: Namespace) -> None:
    if cluster.venv_python is None:
        pytest.skip("the images of a cluster of KUBECONFIG bring their own Python")
    asked = [cluster.venv_python, "-c", "import stopway_core, stopway_engine; print('there')"]
    for part in ("engine", "gateway", "operator"):
        image = getattr(cluster.images, part)
        container = {"name": "main", "image": image, "command": asked}
        spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
        if part == "gateway":
            spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": 65532}
        namespace.kubectl.apply(_object("v1", "Pod", part, spec))
    for part in ("engine", "gateway", "operator"):
        wait_for(part, lambda part=part: "there" in namespace.kubectl.logs(part), 120)  # type: ignore[misc]


def test_redis_runs_and_can_be_cut_from_one_node(
    cluster: Cluster, namespace: Namespace, faults: Faults
) -> None:
    kubectl = namespace.kubectl
    redis = {"name": "main", "image": cluster.images.redis, "args": ["--protected-mode", "no"]}
    *others, last = cluster.nodes
    kubectl.apply(
        [
            _object("v1", "Pod", "redis", _on(last, redis), app="redis"),
            _service("redis", "redis", port=6379),
            *(
                _object("v1", "Pod", f"from-{node}", _on(node, _sleeper(cluster)))
                for node in others
            ),
        ]
    )
    kubectl.wait_ready("redis")

    def ping(node: str) -> bool:
        asked = ("timeout", "2", "redis-cli", "-h", "redis", "ping")
        try:
            return "PONG" in kubectl.exec(f"from-{node}", *asked)
        except KubectlError:
            return False

    for node in others:
        kubectl.wait_ready(f"from-{node}")
        wait_for(f"Redis answers {node}", lambda node=node: ping(node), 60)  # type: ignore[misc]
    faults.cut_from_pods(others[0], kubectl, "app=redis")
    assert not ping(others[0])
    wait_for("the others reach it", lambda: all(ping(node) for node in others[1:]), 30)
    assert not ping(others[0])
    faults.mend(others[0])
    wait_for("Redis answers again", lambda: ping(others[0]), 30)


def test_two_nodes_lose_each_other(serving: Namespace, faults: Faults) -> None:
    (first, second, third) = (serving.kubectl.get("pod", f"web-{i}") for i in range(3))
    with faults.partitioned(node_of(first), node_of(second)):
        assert not _reaches(serving, first, second)
        wait_for("the third is reached", lambda: _reaches(serving, first, third), 30)
        assert not _reaches(serving, second, first)
        stays("both are ready", lambda: _both_ready(serving, first, second), 3)
    wait_for("they have found each other", lambda: _reaches(serving, first, second), 30)


def test_jaeger_takes_spans_and_shows_them(jaeger: Jaeger, serving: Namespace) -> None:
    trace_id, now_ns = secrets.token_hex(16), time.time_ns()
    span = {
        "traceId": trace_id,
        "spanId": secrets.token_hex(8),
        "name": "probe",
        "kind": 1,
        "startTimeUnixNano": str(now_ns),
        "endTimeUnixNano": str(now_ns + 5_000_000),
        "attributes": [{"key": "stopway.rank", "value": {"intValue": "1"}}],
    }
    resource = [{"key": "service.name", "value": {"stringValue": "probe"}}]
    batch = {"resource": {"attributes": resource}, "scopeSpans": [{"spans": [span]}]}
    serving.kubectl.exec(
        *("web-0", "curl", "-sf", "-H", "Content-Type: application/json"),
        *("-d", json.dumps({"resourceSpans": [batch]}), f"{jaeger.otlp_endpoint}/v1/traces"),
    )
    trace = jaeger.wait_for_spans(trace_id, ["probe"])
    assert trace.values("probe", "stopway.rank") == {1}
    wait_for("its service is listed", lambda: "probe" in jaeger.services(), 30)


def test_helm_reaches_the_cluster(cluster: Cluster) -> None:
    assert json.loads(cluster.kubectl.helm("list", "-A", "-o", "json")) == []


def test_a_node_hangs_and_recovers(serving: Namespace, faults: Faults) -> None:
    node = node_of(serving.kubectl.get("pod", "web-0"))
    with faults.frozen(node):
        faults.wait_seen_lost(node)
    wait_for("web-0 serves", lambda: _serves(serving, "pod/web-0"), 30)


def test_a_cable_is_pulled(serving: Namespace, faults: Faults) -> None:
    node = node_of(serving.kubectl.get("pod", "web-1"))
    with faults.unplugged(node):
        faults.wait_seen_lost(node)
    wait_for("web-1 serves", lambda: _serves(serving, "pod/web-1"), 30)


def test_a_node_loses_its_power_and_boots(serving: Namespace, faults: Faults) -> None:
    pod = serving.kubectl.get("pod", "web-2")
    with faults.lost(node_of(pod)):
        # The others do not depend on it, nor does the way to Services.
        for name in ("web-0", "web-1"):
            wait_for(f"{name} serves", lambda name=name: _serves(serving, f"pod/{name}"), 30)  # type: ignore[misc]
        wait_for("its endpoint is out", lambda: "web-" in _serves(serving, "svc/front"), 30)
    wait_for("web-2 serves again", lambda: _serves(serving, "pod/web-2"), 60)


def test_the_kubelet_dies_and_the_pod_serves_on(serving: Namespace, faults: Faults) -> None:
    node = node_of(serving.kubectl.get("pod", "web-0"))
    faults.kubelet_off(node)
    faults.wait_seen_lost(node)
    wait_for("web-0 serves on", lambda: "web-0" in _serves(serving, "pod/web-0"), 30)
    faults.kubelet_on(node)
    faults.wait_ready(node)


def _serves(space: Namespace, target: str) -> str:
    with space.http(target, PORT, timeout=10) as client:
        return client.get("/").raise_for_status().text


def _summed(space: Namespace, rank: int) -> bool:
    return "sum [6.0, 6.0, 6.0, 6.0]" in space.kubectl.logs(f"rank-{rank}")


def _get(space: Namespace, pod: str, url: str) -> str:
    return space.kubectl.exec(pod, "curl", "-sf", "-m", "2", url).split()[0]


def _reaches(space: Namespace, pod: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        return bool(_get(space, name_of(pod), f"http://{other['status']['podIP']}:{PORT}"))
    except KubectlError:
        return False


def _both_ready(space: Namespace, *pods: dict[str, Any]) -> bool:
    return all(space.kubectl.node_ready(node_of(pod)) == "True" for pod in pods)


def _is_another(space: Namespace, name: str, before: dict[str, Any]) -> bool:
    pod = space.kubectl.get("pod", name)
    return bool(
        pod["metadata"]["uid"] != before["metadata"]["uid"] and pod["status"]["phase"] == "Running"
    )


def _wait_running(space: Namespace, name: str) -> None:
    def running() -> bool:
        pods = space.kubectl.pods(f"app={name}")
        return len(pods) == 3 and all(pod["status"]["phase"] == "Running" for pod in pods)

    wait_for(f"three pods of {name} run", running, 90)


def _object(
    version: str, kind: str, name: str, spec: dict[str, Any], **labels: str
) -> dict[str, Any]:
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _service(name: str, app: str, port: int = PORT, **spec: Any) -> dict[str, Any]:
    return _object(
        "v1", "Service", name, {"selector": {"app": app}, "ports": [{"port": port}], **spec}
    )


def _on(node: str, container: dict[str, Any]) -> dict[str, Any]:
    selector = {"kubernetes.io/hostname": node}
    return {
        "nodeSelector": selector,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }


def _sleeper(cluster: Cluster) -> dict[str, Any]:
    return {"name": "main", "image": cluster.images.redis, "command": ["sleep", "inf"]}


def _group(
    name: str, image: str, command: list[str], container: dict[str, Any]
) -> list[dict[str, Any]]:
    """Three pods, one a node, that stay where they are, and their headless Service."""
    labels = {"app": name}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": labels},
    }
    env = [
        {"name": "HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "OMP_NUM_THREADS", "value": "1"},
    ]
    pod = {
        "terminationGracePeriodSeconds": 5,
        "topologySpreadConstraints": [spread],
        "containers": [
            {"name": "main", "image": image, "command": command, "env": env, **container}
        ],
    }
    spec = {
        "replicas": 3,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return [
        _object("apps/v1", "StatefulSet", name, spec),
        _service(name, name, clusterIP="None", publishNotReadyAddresses=True),
    ]
