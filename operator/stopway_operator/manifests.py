"""What is installed: the same objects as plain manifests and as the chart's, from one source.

    python -m stopway_operator.manifests          write manifests/, charts/stopway/ and docs/crd.md
    python -m stopway_operator.manifests --check  say which of them are out of date

Run it from the root of the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stopway_operator import crd, documents, kinds, objects
from stopway_operator.config import PREFIX, OperatorConfig
from stopway_operator.kinds import Kind
from stopway_operator.objects import Obj

NAME = objects.MANAGER
NAMESPACE = OperatorConfig().namespace
IMAGE = f"stopway/operator:{OperatorConfig().images.engine.rpartition(':')[2]}"
LABELS = {objects.LABEL_NAME: NAME, "app.kubernetes.io/part-of": "stopway"}


def _rule(kind: Kind, verbs: str, resource: str = "") -> Obj:
    return {
        "apiGroups": [kind.group],
        "resources": [resource or kind.plural],
        "verbs": verbs.split(),
    }


def namespaced_rules() -> list[Obj]:
    """What the operator may do where it serves: no more than it does."""
    owned = "get list watch create patch delete"
    return [
        _rule(kinds.SERVICE, "get list watch"),
        _rule(kinds.SERVICE, "patch", f"{kinds.SERVICE.plural}/status"),
        *(_rule(kind, owned) for kind in kinds.APPLIED),
        _rule(kinds.POD, "get list watch delete"),
        # By name only: Secrets are neither listed nor watched nor changed.
        _rule(kinds.SECRET, "get create"),
        _rule(kinds.EVENT, "create"),
    ]


def cluster_rules() -> list[Obj]:
    """Nodes: to know which pods are lost."""
    return [_rule(kinds.NODE, "get list watch")]


def edit_rules() -> list[Obj]:
    """For people who may edit a namespace."""
    plural = kinds.SERVICE.plural
    return [
        _rule(kinds.SERVICE, "get list watch create update patch delete"),
        _rule(kinds.SERVICE, "get", f"{plural}/status"),
        _rule(kinds.SERVICE, "get update patch", f"{plural}/scale"),
    ]


def _meta(name: str, namespaced: bool = True) -> Obj:
    found: Obj = {"name": name, "labels": dict(LABELS)}
    return {"name": name, "namespace": NAMESPACE, "labels": dict(LABELS)} if namespaced else found


def _rbac_object(kind: str, name: str, namespaced: bool, **body: Any) -> Obj:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": _meta(name, namespaced),
        **body,
    }


def rbac() -> list[Obj]:
    """A service account and what it may do, cluster-wide."""
    subjects = [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    rules = [*namespaced_rules(), *cluster_rules()]
    people = _rbac_object("ClusterRole", f"{NAME}-edit", False, rules=edit_rules())
    people["metadata"]["labels"] |= {
        "rbac.authorization.k8s.io/aggregate-to-admin": "true",
        "rbac.authorization.k8s.io/aggregate-to-edit": "true",
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(NAME)},
        _rbac_object("ClusterRole", NAME, False, rules=rules),
        _rbac_object("ClusterRoleBinding", NAME, False, roleRef=reference, subjects=subjects),
        people,
    ]


def deployment() -> Obj:
    """The operator itself."""
    config = OperatorConfig()
    images = config.images
    env: list[Obj] = [
        {
            "name": f"{PREFIX}NAMESPACE",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        },
        {"name": f"{PREFIX}ENGINE_IMAGE", "value": images.engine},
        {"name": f"{PREFIX}GATEWAY_IMAGE", "value": images.gateway},
        {"name": f"{PREFIX}REDIS_IMAGE", "value": images.redis},
    ]
    probe = {"path": "/healthz", "port": "health"}
    container = {
        "name": "operator",
        "image": IMAGE,
        "args": ["--all"],
        "env": env,
        "ports": [{"name": "health", "containerPort": config.health_port, "protocol": "TCP"}],
        "startupProbe": {"httpGet": probe, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {
            "httpGet": probe,
            "periodSeconds": 20,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "readinessProbe": {
            "httpGet": {**probe, "path": "/readyz"},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        },
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(NAME),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {objects.LABEL_NAME: NAME}},
            "template": {
                "metadata": {"labels": dict(LABELS)},
                "spec": {
                    "serviceAccountName": NAME,
                    # PID 1 gets no SIGTERM before it has a handler; the pause process is that.
                    "shareProcessNamespace": True,
                    "terminationGracePeriodSeconds": 15,
                    # It repairs what a lost node takes along, and must not itself wait the
                    # cluster's five minutes to leave that node.
                    "tolerations": [
                        {
                            "key": f"node.kubernetes.io/{what}",
                            "operator": "Exists",
                            "effect": "NoExecute",
                            "tolerationSeconds": 15,
                        }
                        for what in ("not-ready", "unreachable")
                    ],
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 10001,
                        "runAsGroup": 10001,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container],
                },
            },
        },
    }


def namespace() -> Obj:
    """Where the operator runs; its pods need no privilege."""
    labels = {**LABELS, "pod-security.kubernetes.io/warn": "restricted"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": labels},
    }


def _indented(value: Any, spaces: int = 0) -> str:
    text = documents.dump([value], header="").rstrip("\n")
    return "\n".join(" " * spaces + line for line in text.splitlines())


def chart_rules() -> str:
    """The chart's rules, as named templates."""
    return "".join(
        [
            "{{- /* Generated by `python -m stopway_operator.manifests`; do not edit. */}}\n",
            '{{- define "stopway.rules" }}\n',
            _indented(namespaced_rules()),
            "\n{{- end }}\n",
            '{{- define "stopway.clusterRules" }}\n',
            _indented(cluster_rules()),
            "\n{{- end }}\n",
            '{{- define "stopway.editRules" }}\n',
            _indented(edit_rules()),
            "\n{{- end }}\n",
        ]
    )


def chart_crd() -> str:
    """The CRD as a template, so that upgrades bring it up to date and uninstalling keeps it."""
    found = crd.crd()
    found["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    body = documents.dump([found]).replace("{{", "{{ `{{` }}")
    return f"{{{{- if .Values.crd.install }}}}\n{body}{{{{- end }}}}\n"


def files() -> dict[str, str]:
    """Every generated file, by its path in the repository."""
    return {
        "manifests/00-crd.yaml": documents.dump([crd.crd()]),
        "manifests/10-operator.yaml": documents.dump([namespace(), *rbac(), deployment()]),
        "charts/stopway/templates/crd.yaml": chart_crd(),
        "charts/stopway/templates/_rules.tpl": chart_rules(),
        "docs/crd.md": documents.reference(),
    }


def main() -> None:
    """Write them, or with ``--check`` name those that differ and exit with 1."""
    stale = []
    for path, text in files().items():
        file = Path(path)
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if "--check" not in sys.argv[1:]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        sys.exit(f"out of date, run `python -m stopway_operator.manifests`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
