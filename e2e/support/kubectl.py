"""kubectl, and the few questions that tests keep asking the API server."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.progress import wait_for

Object = dict[str, Any]


class KubectlError(Exception):
    """kubectl said no; the message is its stderr."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl of one cluster and, when `namespace` is set, of one namespace."""

    kubeconfig: str
    program: str = "kubectl"
    helm_program: str = "helm"
    namespace: str | None = None

    def within(self, namespace: str) -> "Kubectl":
        return replace(self, namespace=namespace)

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Its stdout; `KubectlError` when it fails."""
        command = [self.program, *self._target(), *arguments]
        return _run(command, stdin, timeout_s)

    def helm(self, *arguments: str, timeout_s: float = 300) -> str:
        return _run([self.helm_program, *self._target(), *arguments], None, timeout_s)

    def start(self, *arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
        """A kubectl that runs on: `logs -f`, `port-forward`."""
        return subprocess.Popen([self.program, *self._target(), *arguments], text=True, **kwargs)

    def get(self, kind: str, name: str) -> Object:
        found: Object = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, name: str) -> Object | None:
        """As `get`, and None when there is none."""
        text = self("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text else None

    def objects(self, kind: str, selector: str = "", everywhere: bool = False) -> Sequence[Object]:
        arguments = ["get", kind, "-o", "json"]
        if selector:
            arguments += ["-l", selector]
        if everywhere:
            arguments += ["-A"]
        items: Sequence[Object] = json.loads(self(*arguments))["items"]
        return items

    def apply(self, manifest: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
        """Applies YAML text, a file or folder of it, an object, or several."""
        if isinstance(manifest, Path):
            return self("apply", "-f", str(manifest))
        return self("apply", "-f", "-", stdin=_text(manifest))

    def delete(self, kind: str, name: str, *arguments: str) -> None:
        self("delete", kind, name, "--ignore-not-found", *arguments)

    def exec(
        self, pod: str, *command: str, container: str | None = None, timeout_s: float = 60
    ) -> str:
        where = ["-c", container] if container else []
        return self("exec", pod, *where, "--", *command, timeout_s=timeout_s)

    def logs(self, pod: str, *arguments: str) -> str:
        return self("logs", pod, *arguments)

    def pods(self, selector: str = "") -> Sequence[Object]:
        """The pods that are not being deleted."""
        return [p for p in self.objects("pods", selector) if not is_leaving(p)]

    def wait_ready(self, pod: str, seconds: float = 60) -> Object:
        """The pod, once it is ready."""

        def ready() -> Object | None:
            found = self.get("pod", pod)
            return found if is_ready(found) else None

        found = wait_for(f"pod {pod} is ready", ready, seconds)
        assert found is not None
        return found

    def node_ready(self, node: str) -> str:
        """The Ready condition of the node: True, False or Unknown."""
        return condition(self.get("node", node), "Ready")

    def _target(self) -> list[str]:
        target = [f"--kubeconfig={self.kubeconfig}"]
        return [*target, f"--namespace={self.namespace}"] if self.namespace else target


def condition(found: Object, kind: str) -> str:
    """The status of a condition: True, False, Unknown, or "" when there is none."""
    for each in found.get("status", {}).get("conditions", []):
        if each["type"] == kind:
            status: str = each["status"]
            return status
    return ""


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready") == "True" and not is_leaving(pod)


def is_leaving(found: Object) -> bool:
    return "deletionTimestamp" in found["metadata"]


def name_of(found: Object) -> str:
    name: str = found["metadata"]["name"]
    return name


def node_of(pod: Object) -> str:
    """The pod's node; "" while it has none."""
    node: str = pod["spec"].get("nodeName", "")
    return node


def _text(manifest: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(manifest, str):
        return manifest
    if isinstance(manifest, Mapping):
        return json.dumps(manifest)
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifest)})


def _run(command: Sequence[str], stdin: str | None, timeout_s: float) -> str:
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={key: value for key, value in os.environ.items() if key != "KUBECONFIG"},
    )
    if done.returncode != 0:
        asked = " ".join(command[2:])
        raise KubectlError(f"{asked}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
