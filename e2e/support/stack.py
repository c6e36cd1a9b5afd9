"""The cluster as the tests see it: one of KUBECONFIG, or the project's own."""

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from cluster import lifecycle, preflight, state
from cluster.paths import BIN, CONTROL, RUN, VENV_IN_POD, netns_file

from support import progress
from support.faults import Faults
from support.kubectl import Kubectl, name_of
from support.progress import say
from support.reach import Inside, PortForwards, Reach

OWN_TAG = "e2e"
IMAGE_PARTS = ("engine", "gateway", "operator", "redis", "jaeger", "python")


class Unavailable(Exception):
    """There is no cluster to test on; the message says why and what to do."""


@dataclass(frozen=True)
class Images:
    """Names of images that the cluster's nodes can run."""

    engine: str
    engine_next: str  # another name for the same: what a rollout goes to
    gateway: str
    operator: str
    redis: str
    jaeger: str
    python: str  # anything with python3 and a shell, for helpers of the tests


@dataclass
class Cluster:
    """`kubectl` is bound to no namespace; `faults` is None where nodes can't be broken."""

    kubectl: Kubectl
    images: Images
    reach: Reach
    faults: Faults | None
    forwards: PortForwards
    venv_python: str | None  # the python of Stopway's pods, where they get it by hostPath

    @property
    def nodes(self) -> Sequence[str]:
        return [name_of(node) for node in self.kubectl.objects("nodes")]

    @property
    def is_own(self) -> bool:
        return self.faults is not None


@dataclass(frozen=True)
class Namespace:
    """A namespace of one test, and the way in."""

    name: str
    cluster: Cluster

    @property
    def kubectl(self) -> Kubectl:
        return self.cluster.kubectl.within(self.name)

    def http(self, target: str, port: int, **options: Any) -> httpx.Client:
        """A client for `svc/NAME` or `pod/NAME`; close it."""
        return self.cluster.reach.http(self.kubectl, target, port, **options)

    def async_http(self, target: str, port: int, **options: Any) -> httpx.AsyncClient:
        return self.cluster.reach.async_http(self.kubectl, target, port, **options)

    def forward(self, target: str, port: int) -> int:
        """A port of the host's loopback that leads there, for programs that aren't the test."""
        return self.cluster.forwards.port(self.kubectl, target, port)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """The cluster of KUBECONFIG; else the one that `ctl up` left up; else a new one."""
    forwards = PortForwards()
    try:
        if os.environ.get("KUBECONFIG"):
            yield _of_kubeconfig(os.environ["KUBECONFIG"], forwards)
            return
        with _own_cluster() as found:
            yield _own(found, forwards)
    finally:
        forwards.close()


def _of_kubeconfig(kubeconfig: str, forwards: PortForwards) -> Cluster:
    names = {part: os.environ.get(f"STOPWAY_E2E_IMAGE_{part.upper()}") for part in IMAGE_PARTS}
    lacking = [f"STOPWAY_E2E_IMAGE_{part.upper()}" for part, name in names.items() if not name]
    if lacking:
        raise Unavailable(f"With KUBECONFIG, name the images to test: {', '.join(lacking)}.")
    program = shutil.which("kubectl")
    if program is None:
        raise Unavailable("With KUBECONFIG, kubectl must be on PATH.")
    chosen = {part: str(name) for part, name in names.items()}
    following = os.environ.get("STOPWAY_E2E_IMAGE_ENGINE_NEXT") or chosen["engine"]
    return Cluster(
        kubectl=Kubectl(kubeconfig, program, shutil.which("helm") or "helm"),
        images=Images(engine_next=following, **chosen),
        reach=forwards,
        faults=None,
        forwards=forwards,
        venv_python=None,
    )


def _own(found: state.State, forwards: PortForwards) -> Cluster:
    kubectl = Kubectl(f"{RUN}/host.conf", str(BIN / "kubectl"), str(BIN / "helm"))
    return Cluster(
        kubectl=kubectl,
        images=Images(
            engine=f"localhost/stopway-engine:{OWN_TAG}",
            engine_next=f"localhost/stopway-engine:{OWN_TAG}-next",
            gateway=f"localhost/stopway-gateway:{OWN_TAG}",
            operator=f"localhost/stopway-operator:{OWN_TAG}",
            redis=f"localhost/redis:{OWN_TAG}",
            jaeger=f"localhost/jaeger:{OWN_TAG}",
            python="localhost/debian:12",
        ),
        reach=Inside(netns_file(CONTROL)),
        faults=Faults(found, kubectl),
        forwards=forwards,
        venv_python=f"{VENV_IN_POD}/bin/python",
    )


@contextmanager
def _own_cluster() -> Iterator[state.State]:
    """One that is up is used and left; one that is brought up here goes with this process."""
    found = state.load()
    if found is not None and not state.is_abandoned(found):
        if not lifecycle.is_healthy():
            raise Unavailable("e2e/cluster is up but not healthy: `e2e/cluster/ctl down` ends it.")
        with progress.uncaptured():
            lifecycle.refresh()
        yield found
        return
    missing = preflight.missing()
    if missing:
        raise Unavailable(" ".join(missing))
    keep = bool(os.environ.get("STOPWAY_E2E_KEEP"))
    with progress.uncaptured():
        lifecycle.up(
            node_count=int(os.environ.get("NODES", "3")),
            node_grace_s=int(os.environ.get("NODE_GRACE", "8")),
            owner=None if keep else os.getpid(),
        )
    made = state.load()
    assert made is not None
    try:
        yield made
    finally:
        if keep:
            say("the cluster is left up (STOPWAY_E2E_KEEP): `e2e/cluster/ctl down` ends it")
        else:
            with progress.uncaptured():
                lifecycle.down()


@contextmanager
def new_namespace(found: Cluster, stem: str) -> Iterator[Namespace]:
    """A namespace with a name of its own. At the end faults are mended, and it must go."""
    short = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    name = f"{short}-{secrets.token_hex(2)}"
    found.kubectl("create", "namespace", name)
    try:
        yield Namespace(name, found)
    finally:
        if found.faults is not None:
            found.faults.heal()
        problem = delete_namespace(found, name)
        if problem is not None:
            say(problem)
    if problem is not None:
        raise AssertionError(problem)


def delete_namespace(found: Cluster, name: str, seconds: float = 100) -> str | None:
    """Deletes it within a bound, by force if it must; what was in the way, or None."""
    kubectl = found.kubectl
    kubectl.delete("namespace", name, "--wait=false")
    if _gone(kubectl, name, seconds):
        return None
    inside = kubectl.within(name)
    left = [f"pod {name_of(pod)}" for pod in inside.objects("pods")]
    with suppress(Exception):
        inside("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    with suppress(Exception):
        for each in inside.objects("inferenceservices.serving.stopway.dev"):
            left.append(f"inferenceservice {name_of(each)} {each['metadata'].get('finalizers')}")
            patch = '{"metadata":{"finalizers":null}}'
            inside("patch", "inferenceservice", name_of(each), "--type=merge", "-p", patch)
    _gone(kubectl, name, seconds)
    return f"namespace {name} was not gone after {seconds:.0f} s; in it: {', '.join(left)}"


def _gone(kubectl: Kubectl, name: str, seconds: float) -> bool:
    with suppress(Exception):
        kubectl("wait", "--for=delete", f"namespace/{name}", f"--timeout={seconds:.0f}s")
    return kubectl.find("namespace", name) is None
