"""Reading Kubernetes objects as plain dicts; pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Obj = dict[str, Any]

MANAGER = "stopway-operator"

LABEL_MANAGED = "app.kubernetes.io/managed-by"
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_UID = "stopway.dev/service-uid"
LABEL_GROUP = "stopway.dev/group"
LABEL_REVISION = "stopway.dev/revision"
LABEL_INDEX = "apps.kubernetes.io/pod-index"  # set by the StatefulSet controller

ANNOTATION_APPLIED = "stopway.dev/applied"
ANNOTATION_RELEASED_AT = "stopway.dev/released-at"
ANNOTATION_RELEASES = "stopway.dev/releases"

ENGINE, GATEWAY, REDIS = "engine", "gateway", "redis"


def meta(obj: Mapping[str, Any]) -> Obj:
    """Its metadata, empty where it has none."""
    found: Obj = obj.get("metadata") or {}
    return found


def name_of(obj: Mapping[str, Any]) -> str:
    return str(meta(obj).get("name", ""))


def namespace_of(obj: Mapping[str, Any]) -> str:
    return str(meta(obj).get("namespace", ""))


def uid_of(obj: Mapping[str, Any]) -> str:
    return str(meta(obj).get("uid", ""))


def label(obj: Mapping[str, Any], key: str) -> str:
    return str((meta(obj).get("labels") or {}).get(key, ""))


def annotation(obj: Mapping[str, Any], key: str) -> str:
    return str((meta(obj).get("annotations") or {}).get(key, ""))


def deleting(obj: Mapping[str, Any]) -> bool:
    return bool(meta(obj).get("deletionTimestamp"))


def controller_of(obj: Mapping[str, Any]) -> Obj:
    """The owner reference of its controller, or an empty dict."""
    for reference in meta(obj).get("ownerReferences") or ():
        if reference.get("controller"):
            found: Obj = reference
            return found
    return {}


def condition_of(obj: Mapping[str, Any], kind: str) -> Obj:
    """One of its status conditions, or an empty dict."""
    for condition in (obj.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind:
            found: Obj = condition
            return found
    return {}


def is_true(obj: Mapping[str, Any], kind: str) -> bool:
    return condition_of(obj, kind).get("status") == "True"


def version_of(obj: Mapping[str, Any]) -> int:
    """The resource version as a number that grows; 0 where there is none."""
    text = str(meta(obj).get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def seconds(timestamp: Any) -> float:
    """Unix seconds of an RFC 3339 time; 0 for anything else."""
    try:
        return datetime.fromisoformat(str(timestamp).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def timestamp(unix: float) -> str:
    """RFC 3339 with whole seconds, as Kubernetes writes times."""
    return datetime.fromtimestamp(int(unix), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def digest(value: Any, length: int = 16) -> str:
    """A hex digest of plain data that is the same in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
