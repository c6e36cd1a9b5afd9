"""A real Jaeger in the cluster under test, in a namespace of its own."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml  # type: ignore[import-untyped]
from cluster.paths import ROOT

from support.jaeger import Jaeger
from support.kubectl import Object
from support.progress import wait_for
from support.stack import Cluster, Namespace, delete_namespace

MANIFEST = ROOT / "manifests" / "jaeger.yaml"
NAME = "jaeger"
NAMESPACE = "stopway-e2e-jaeger"
QUERY_PORT = 16686
OTLP_PORT = 4318


@contextmanager
def serve_jaeger(cluster: Cluster) -> Iterator[Jaeger]:
    """Deploys the project's own manifest of it, and deletes it at the end."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    cluster.kubectl.apply(namespace)
    space = Namespace(NAMESPACE, cluster)
    try:
        space.kubectl.apply(_objects(cluster))
        space.kubectl("rollout", "status", f"deployment/{NAME}", "--timeout=90s")
        with space.http(f"svc/{NAME}", QUERY_PORT) as query:
            wait_for("Jaeger answers", lambda: query.get("/api/services").is_success, 30)
            endpoint = f"http://{NAME}.{NAMESPACE}.svc.cluster.local:{OTLP_PORT}"
            yield Jaeger(query, endpoint)
    finally:
        delete_namespace(cluster, NAMESPACE)


def _objects(cluster: Cluster) -> list[Object]:
    """As in the manifest, but here, with our image, and on a node that no test breaks."""
    text = MANIFEST.read_text()
    text = re.sub(r"^( *namespace:).*$", rf"\1 {NAMESPACE}", text, flags=re.M)
    text = re.sub(r"^( *image:).*$", rf"\1 {cluster.images.jaeger}", text, flags=re.M)
    objects: list[Object] = list(yaml.safe_load_all(text))
    for each in objects:
        if each["kind"] == "Deployment" and cluster.is_own:  # its traces are in memory
            pod = each["spec"]["template"]["spec"]
            pod["nodeSelector"] = {"kubernetes.io/hostname": cluster.nodes[-1]}
    return objects
