"""A pod template: what the operator gives, completed by what the user's template says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stopway_operator import objects
from stopway_operator.crd import PodTemplate
from stopway_operator.objects import Obj

USER_ID = 10001  # of the images; any other works as well

POD_SECURITY: Obj = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Obj = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True)
class Parts:
    """What the operator itself wants of a pod."""

    component: str
    labels: Mapping[str, str]
    image: str
    env: list[Obj]
    ports: Mapping[str, int]
    grace_s: int
    lost_s: int
    group: str = ""
    pods: int = 1
    command: tuple[str, ...] = ()  # empty: the image's entry point
    annotations: Mapping[str, str] = field(default_factory=dict)
    probes: Obj = field(default_factory=dict)
    lifecycle: Obj = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    volumes: list[Obj] = field(default_factory=list)
    mounts: list[Obj] = field(default_factory=list)


def pod_template(parts: Parts, template: PodTemplate) -> Obj:
    """The ``template`` of a StatefulSet or Deployment."""
    container = _drop_empty(
        {
            "name": parts.component,
            "image": template.image or parts.image,
            "imagePullPolicy": template.image_pull_policy,
            "command": list(parts.command),
            "env": _env(parts.env, template.env),
            "ports": [
                {"name": name, "containerPort": port, "protocol": "TCP"}
                for name, port in parts.ports.items()
            ],
            **parts.probes,
            "lifecycle": parts.lifecycle,
            "resources": _resources(template.resources, parts.limits),
            "volumeMounts": [*parts.mounts, *template.volume_mounts],
            "securityContext": template.container_security_context or CONTAINER_SECURITY,
            # The one sentence with which a process refuses its settings reaches the status.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )
    spec = _drop_empty(
        {
            "containers": [container],
            "volumes": [*parts.volumes, *template.volumes],
            # Else our process is PID 1 of its container, and the kernel drops a SIGTERM that comes
            # before it has a handler: the seconds of its imports. It would start, serve, and be
            # killed in the midst of it at the end of the grace period.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": parts.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": template.security_context or POD_SECURITY,
            "affinity": template.affinity or _spread(parts),
            "tolerations": [*_lost_tolerations(parts, template), *template.tolerations],
            "nodeSelector": template.node_selector,
            "topologySpreadConstraints": template.topology_spread_constraints,
            "imagePullSecrets": template.image_pull_secrets,
            "schedulerName": template.scheduler_name,
            "priorityClassName": template.priority_class_name,
            "runtimeClassName": template.runtime_class_name,
            "serviceAccountName": template.service_account_name,
        }
    )
    if template.runtime_class_name == "":
        spec.pop("runtimeClassName", None)
    metadata = {
        "labels": {**_filled(template.labels, parts), **parts.labels},
        "annotations": {**_filled(template.annotations, parts), **parts.annotations},
    }
    return {"metadata": _drop_empty(metadata), "spec": spec}


def secret_env(name: str, secret: str, key: str) -> Obj:
    """A variable from a key of a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def field_env(name: str, path: str) -> Obj:
    """A variable from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def http_probe(path: str, port: str, **numbers: int) -> Obj:
    return {"httpGet": {"path": path, "port": port}, **numbers}


def _drop_empty(fields: Obj) -> Obj:
    return {key: value for key, value in fields.items() if value not in ("", None, [], {})}


def _env(ours: list[Obj], theirs: list[Obj]) -> list[Obj]:
    fixed = {entry["name"] for entry in ours if entry["name"].startswith("STOPWAY_")}
    added = [entry for entry in theirs if entry.get("name") not in fixed]
    replaced = {entry.get("name") for entry in added}
    return [*(entry for entry in ours if entry["name"] not in replaced), *added]


def _resources(given: Obj | None, limits: Mapping[str, str]) -> Obj:
    """Extended resources are requested as much as limited."""
    if not limits:
        return given or {}
    found = dict(given or {})
    for kind in ("requests", "limits"):
        found[kind] = {**limits, **(found.get(kind) or {})}
    return found


def _spread(parts: Parts) -> Obj:
    """Softly over nodes: it helps when there is room, and never keeps a pod from running."""
    key = objects.LABEL_GROUP if parts.group else objects.LABEL_COMPONENT
    labels = {objects.LABEL_INSTANCE: parts.labels[objects.LABEL_INSTANCE], key: parts.labels[key]}
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": labels},
                    },
                }
            ]
        }
    }


def _lost_tolerations(parts: Parts, template: PodTemplate) -> list[Obj]:
    """A pod leaves a lost node after the bound, not after Kubernetes' five minutes."""
    given = {toleration.get("key") for toleration in template.tolerations}
    return [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": parts.lost_s,
        }
        for key in _LOST
        if key not in given and None not in given
    ]


def _filled(values: Mapping[str, str], parts: Parts) -> dict[str, Any]:
    return {
        key: value.replace("{group}", parts.group).replace("{pods}", str(parts.pods))
        for key, value in values.items()
    }
