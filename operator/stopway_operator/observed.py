"""What is seen of one service, and the facts of its groups that follow; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stopway_operator import kinds, objects
from stopway_operator.kinds import Kind
from stopway_operator.lifecycle import Facts
from stopway_operator.objects import Obj
from stopway_operator.render.context import Context
from stopway_operator.render.engine import group_index, group_name


@dataclass(frozen=True)
class Observed:
    """Everything that a plan looks at.

    ``objects`` has what bears a name that this service uses, whoever owns it. ``secrets`` has
    metadata and the names of keys, never values. ``epochs`` is what leaders said, by the UID of
    their pod (None: not in an epoch; absent: nobody knows), ``gateways`` the groups that a gateway
    can send to, in the same way. ``nodes`` is None when the operator may not see them.
    """

    service: Obj
    objects: Mapping[tuple[str, str], Obj] = field(default_factory=dict)
    pods: Sequence[Obj] = ()
    secrets: Mapping[str, Obj] = field(default_factory=dict)
    nodes: Mapping[str, Obj] | None = None
    epochs: Mapping[str, int | None] = field(default_factory=dict)
    gateways: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: Sequence[str] = ()  # writes that the API server did not take, just now

    @property
    def uid(self) -> str:
        return objects.uid_of(self.service)

    def find(self, kind: Kind, name: str) -> Obj | None:
        """The object of that name, whoever owns it."""
        return self.objects.get((kind.name, name))

    def foreign(self, found: Obj) -> bool:
        """Whether it belongs to somebody else, or to a service of this name that is no more."""
        return objects.controller_of(found).get("uid") != self.uid

    def of_component(self, component: str) -> list[Obj]:
        """Its pods, in the order of their names."""
        found = [p for p in self.pods if objects.label(p, objects.LABEL_COMPONENT) == component]
        return sorted(found, key=objects.name_of)

    def of_group(self, name: str) -> list[Obj]:
        """The pods of one group, by index."""
        found = [p for p in self.pods if objects.label(p, objects.LABEL_GROUP) == name]
        return sorted(found, key=lambda p: (pod_index(p), objects.name_of(p)))


def pod_index(pod: Obj) -> int:
    """The index of a pod in its group."""
    text = objects.label(pod, objects.LABEL_INDEX) or objects.name_of(pod).rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def pod_ready(pod: Obj) -> bool:
    return objects.is_true(pod, "Ready") and not objects.deleting(pod)


def unscheduled_since(pod: Obj) -> float | None:
    """Since when the scheduler finds no node for it."""
    condition = objects.condition_of(pod, "PodScheduled")
    if condition.get("status") != "False" or objects.deleting(pod):
        return None
    return objects.seconds(condition.get("lastTransitionTime"))


def all_facts(context: Context, observed: Observed, revision: str) -> list[Facts]:
    """The facts of the wanted groups, and of those beyond that have anything left."""
    indexes = set(range(context.spec.replicas))
    for kind, name in observed.objects:
        if kind in (kinds.STATEFUL_SET.name, kinds.K8S_SERVICE.name, kinds.NETWORK_POLICY.name):
            found = observed.objects[kind, name]
            index = group_index(context, name)
            if index is not None and not observed.foreign(found):
                indexes.add(index)
    for pod in observed.pods:
        index = group_index(context, objects.label(pod, objects.LABEL_GROUP))
        if index is not None:
            indexes.add(index)
    return [_facts(context, observed, index, revision) for index in sorted(indexes)]


def _facts(context: Context, observed: Observed, index: int, revision: str) -> Facts:
    name = group_name(context, index)
    found = observed.find(kinds.STATEFUL_SET, name)
    pods = observed.of_group(name)
    size = len(context.pattern.pods)
    terminating = sum(1 for pod in pods if objects.deleting(pod))
    if found is None:
        return Facts(index, size, pods=len(pods), terminating=terminating)
    if observed.foreign(found) or objects.deleting(found):
        return Facts(index, size, exists=True, blocked=True, pods=len(pods))
    mine = set_revision(found)
    replicas = int(found["spec"].get("replicas", 1))
    revisions = {objects.label(pod, objects.LABEL_REVISION) for pod in pods}
    ready = _ready(observed, pods, replicas, mine)
    released = objects.annotation(found, objects.ANNOTATION_RELEASED_AT)
    releases = objects.annotation(found, objects.ANNOTATION_RELEASES)
    return Facts(
        index=index,
        size=size,
        exists=True,
        current=mine == revision,
        replicas=replicas,
        pods=len(pods),
        terminating=terminating,
        counted=int((found.get("status") or {}).get("replicas", 0)),
        synced=_synced(found),
        ready=ready,
        unlisted_since=_unlisted_since(observed, name, pods) if ready else None,
        mixed=bool(revisions - {mine}),
        incomplete_since=_incomplete_since(pods),
        born=max(map(_created, pods), default=0.0),
        released_at=objects.seconds(released) if released else None,
        releases=int(releases) if releases.isdecimal() else 0,
        jitter=int(objects.digest([observed.uid, index], 4), 16) / 0xFFFF,
    )


def _synced(obj: Obj) -> bool:
    seen = (obj.get("status") or {}).get("observedGeneration", 0)
    return int(seen) >= int(objects.meta(obj).get("generation", 0))


def _created(obj: Obj) -> float:
    return objects.seconds(objects.meta(obj).get("creationTimestamp"))


def set_revision(stateful_set: Obj) -> str:
    """The revision of a StatefulSet's template."""
    return objects.label(stateful_set["spec"]["template"], objects.LABEL_REVISION)


def _ready(observed: Observed, pods: Sequence[Obj], replicas: int, revision: str) -> bool:
    """All its pods are ready, of one revision, and its leader does not deny being in an epoch."""
    if not replicas or len(pods) != replicas:
        return False
    if observed.epochs.get(objects.uid_of(pods[0]), 0) is None:
        return False
    return all(
        pod_ready(pod) and objects.label(pod, objects.LABEL_REVISION) == revision for pod in pods
    )


def _unlisted_since(observed: Observed, name: str, pods: Sequence[Obj]) -> float | None:
    """Since when a gateway that answers could send to this ready group, and can't."""
    behind = [
        gateway
        for gateway in observed.of_component(objects.GATEWAY)
        if name not in observed.gateways.get(objects.uid_of(gateway), (name,))
    ]
    if not behind:
        return None
    became_ready = [objects.condition_of(pod, "Ready").get("lastTransitionTime") for pod in pods]
    # A gateway that is younger than the group has had no longer than its life to find it.
    return max(*map(objects.seconds, became_ready), *map(_created, behind))


def _incomplete_since(pods: Sequence[Obj]) -> float | None:
    """Since when the group holds nodes while a member of it finds none."""
    waiting = [since for pod in pods if (since := unscheduled_since(pod)) is not None]
    placed = [pod for pod in pods if (pod.get("spec") or {}).get("nodeName")]
    return max(waiting) if waiting and placed else None
