"""The operator in the cluster, as its manifests or its chart install it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from support.kubectl import Object, is_ready, name_of
from support.progress import wait_for
from support.stack import Cluster, Namespace

REPO = Path(__file__).parents[2]
SYSTEM = "stopway-system"


def operator_manifests(cluster: Cluster) -> list[Object]:
    """manifests/*.yaml as they are, with the images of this cluster."""
    found = []
    for name in ("00-crd.yaml", "10-operator.yaml"):
        found += [d for d in yaml.safe_load_all((REPO / "manifests" / name).read_text()) if d]
    images = {
        "STOPWAY_OPERATOR_ENGINE_IMAGE": cluster.images.engine,
        "STOPWAY_OPERATOR_GATEWAY_IMAGE": cluster.images.gateway,
        "STOPWAY_OPERATOR_REDIS_IMAGE": cluster.images.redis,
    }
    for document in found:
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            container["image"] = cluster.images.operator
            for variable in container["env"]:
                if variable["name"] in images:
                    variable["value"] = images[variable["name"]]
    return found


class Operator:
    """The operator's Deployment."""

    def __init__(self, cluster: Cluster) -> None:
        self._system = Namespace(SYSTEM, cluster)
        self._kubectl = self._system.kubectl

    def wait(self) -> None:
        wait_for("the operator is ready", lambda: [p for p in self.pods() if is_ready(p)], 150)

    def pods(self) -> list[Object]:
        return list(self._kubectl.pods("app.kubernetes.io/name=stopway-operator"))

    def kill(self) -> None:
        """No goodbye: the process is gone from one moment to the next."""
        for pod in self.pods():
            self._kubectl.delete("pod", name_of(pod), "--force", "--grace-period=0", "--wait=false")

    def scale(self, replicas: int) -> None:
        self._kubectl("scale", "deployment/stopway-operator", f"--replicas={replicas}")
        if not replicas:
            wait_for("the operator is gone", lambda: not self.pods(), 60)

    def set_env(self, setting: str) -> None:
        """``NAME=value``, or ``NAME-`` to take it away; returns when the new process serves."""
        self._kubectl("set", "env", "deployment/stopway-operator", setting)
        self._kubectl("rollout", "status", "deployment/stopway-operator", "--timeout=110s")

    def metric(self, name: str) -> float:
        """One of its own counters; they begin with the process."""
        (pod,) = [p for p in self.pods() if is_ready(p)]
        with self._system.http(f"pod/{name_of(pod)}", 8081) as client:
            text = client.get("/metrics").text
        (line,) = re.findall(rf"^stopway_operator_{name} (\S+)", text, re.M)
        return float(line)

    def logs(self) -> str:
        return "\n".join(self._kubectl.logs(name_of(pod)) for pod in self.pods())


@contextmanager
def installed_operator(cluster: Cluster) -> Iterator[Operator]:
    """The operator, from the manifests; it goes at the end, and so do CRD and namespace."""
    manifests = operator_manifests(cluster)
    operator = Operator(cluster)
    try:
        cluster.kubectl.apply(manifests)
        cluster.kubectl(
            "wait",
            "--for=condition=Established",
            "crd/inferenceservices.serving.stopway.dev",
            "--timeout=60s",
        )
        operator.wait()
        yield operator
    finally:
        # The Deployment first: an operator without rights would only complain.
        cluster.kubectl.within(SYSTEM).delete("deployment", "stopway-operator")
        for document in reversed(manifests):
            if not document["metadata"].get("namespace"):
                cluster.kubectl.delete(document["kind"].lower(), document["metadata"]["name"])


@contextmanager
def installed_by_helm(cluster: Cluster) -> Iterator[Operator]:
    """The operator, from the chart; uninstalled at the end, with the CRD that the chart keeps."""
    repository, tag = cluster.images.operator.rsplit(":", 1)
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "images.engine": cluster.images.engine,
        "images.gateway": cluster.images.gateway,
        "images.redis": cluster.images.redis,
    }
    settings = [f"--set-string={key}={value}" for key, value in values.items()]
    helm = cluster.kubectl.helm
    operator = Operator(cluster)
    try:
        helm(
            "install", "stopway", str(REPO / "charts" / "stopway"), "--namespace", SYSTEM,
            "--create-namespace", "--wait", "--timeout=150s", *settings,
        )  # fmt: skip
        operator.wait()
        yield operator
    finally:
        gone = ("--ignore-not-found", "--wait", "--timeout=120s")
        helm("uninstall", "stopway", "--namespace", SYSTEM, *gone)
        cluster.kubectl.delete("crd", "inferenceservices.serving.stopway.dev")
        cluster.kubectl.delete("namespace", SYSTEM)
