"""From the state of pods and nodes to a sentence that a person can act on; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stopway_operator import objects
from stopway_operator.objects import Obj
from stopway_operator.observed import unscheduled_since

EXIT_CONFIG = 2  # of the engine and the gateway: a restart would not help
UNSCHEDULED_S = 30.0  # an autoscaler or a drain may need a moment
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CREATE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_MESSAGE_MAX = 600


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a service from being as it should."""

    reason: str
    message: str


def pod_problem(pod: Obj, now: float) -> Problem | None:
    """What keeps a pod from running, or None."""
    if objects.deleting(pod):
        return None
    since = unscheduled_since(pod)
    if since is not None:
        if now < since + UNSCHEDULED_S:
            return None
        text = objects.condition_of(pod, "PodScheduled").get("message", "")
        return _problem(pod, "Unschedulable", f"finds no node: {text}")
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        problem = _container_problem(pod, container)
        if problem is not None:
            return problem
    return None


def _container_problem(pod: Obj, status: Obj) -> Problem | None:
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason = str(waiting.get("reason", ""))
    if reason in _PULL:
        image = status.get("image", "")
        return _problem(
            pod, "ImagePullFailed", f"cannot pull {image}: check its name and the pull secrets"
        )
    if reason in _CREATE:
        return _problem(pod, "ContainerNotCreated", str(waiting.get("message", reason)))
    now, before = ((status.get(key) or {}).get("terminated") for key in ("state", "lastState"))
    ended = now or before or {}
    if status.get("ready") or not ended:
        return None
    code = int(ended.get("exitCode", 0))
    said = str(ended.get("message", "")).strip()
    if code == EXIT_CONFIG:
        return _problem(pod, "SettingsRefused", said.rpartition("\n")[2] or "its log says why")
    if ended.get("reason") == "OOMKilled":
        return _problem(pod, "OutOfMemory", "was killed: raise the memory limit or lower kvBlocks")
    if reason == "CrashLoopBackOff":
        return _problem(pod, "CrashLoop", f"exits with {code}: {said or 'its log says why'}")
    return None


def _problem(pod: Obj, reason: str, text: str) -> Problem:
    return Problem(reason, f"pod {objects.name_of(pod)} {text}"[:_MESSAGE_MAX])


def lost_since(node: Obj | None) -> float | None:
    """Since when a node is not ready; None for one that is, or that is not known."""
    if node is None:
        return None
    ready = objects.condition_of(node, "Ready")
    if not ready or ready.get("status") == "True":
        return None
    return objects.seconds(ready.get("lastTransitionTime"))


def lost_pods(
    pods: Sequence[Obj], nodes: Mapping[str, Obj] | None, bound_s: float
) -> list[tuple[Obj, float]]:
    """(pod, when it may be deleted by force) of the pods whose node is lost.

    Without sight of nodes: of those that should have been gone by then, and are not.
    """
    found = []
    for pod in pods:
        name = (pod.get("spec") or {}).get("nodeName")
        if not name:
            continue
        since = lost_since(nodes.get(name)) if nodes is not None else None
        if nodes is None and objects.deleting(pod):
            since = objects.seconds(objects.meta(pod)["deletionTimestamp"])
        if since is not None:
            found.append((pod, since + bound_s))
    return found
