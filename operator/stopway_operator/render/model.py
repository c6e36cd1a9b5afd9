"""Where a model is and how it comes into a pod."""

from __future__ import annotations

from stopway_operator.objects import Obj

MOUNT = "/models"
VOLUME = "model"


def model_path(uri: str) -> str:
    """What the engine is told: ``builtin:NAME`` or the path in the pod."""
    scheme, _, rest = uri.partition(":")
    if scheme == "pvc":
        return f"{MOUNT}/{rest[2:].partition('/')[2]}"
    if scheme == "hostpath":
        return f"{MOUNT}/{rest.rpartition('/')[2]}"
    return uri


def model_volume(uri: str) -> tuple[list[Obj], list[Obj]]:
    """(volumes, volume mounts) that bring the model in, read-only."""
    scheme, _, rest = uri.partition(":")
    if scheme == "pvc":
        source: Obj = {"persistentVolumeClaim": {"claimName": rest[2:].partition("/")[0]}}
        path = MOUNT
    elif scheme == "hostpath":
        source, path = {"hostPath": {"path": rest}}, model_path(uri)
    else:
        return [], []
    return (
        [{"name": VOLUME, **source}],
        [{"name": VOLUME, "mountPath": path, "readOnly": True}],
    )
