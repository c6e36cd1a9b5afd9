"""What the operator has last heard of the cluster: a cache, fed by watches and by relists.

Versions only go forward, so a watch that lags behind a write or a relist changes nothing. Watches
alone are not trusted: one that breaks may miss a deletion for ever, so every kind is listed now
and then, and what a list has and its watch does not say for long makes the operator unhealthy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stopway_operator import kinds, objects
from stopway_operator.kinds import Kind
from stopway_operator.objects import Obj
from stopway_operator.observed import Observed

Key = tuple[str, str]  # (namespace, name)
_NOT_KEPT = ("managedFields",)


class Store:
    """``on_change`` is called with the UID of every service that something concerns."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._objects: dict[str, dict[Key, Obj]] = {kind.name: {} for kind in kinds.WATCHED}
        self._of_service: dict[Key, set[tuple[str, str]]] = {}  # -> (kind, name)
        self._by_uid: dict[str, Key] = {}  # services
        self._on_node: dict[str, set[Key]] = {}
        self._heard: dict[tuple[str, Key], int] = {}
        self._missed: dict[tuple[str, Key], float] = {}
        self.nodes_visible = False

    # --- what comes in -------------------------------------------------------------------

    def put(self, kind: Kind, obj: Obj, *, watched: bool = False) -> None:
        """Take in a state of an object, unless a newer one is known."""
        key = (objects.namespace_of(obj), objects.name_of(obj))
        version = objects.version_of(obj)
        if watched:
            self._heard[kind.name, key] = max(version, self._heard.get((kind.name, key), 0))
            missed = (kind.name, key)
            if missed in self._missed:
                del self._missed[missed]
        known = self._objects[kind.name].get(key)
        if known is not None and objects.version_of(known) >= version:
            return
        if known is not None:
            self._unindex(kind, key, known)
        slim = _slim(kind, obj)
        self._objects[kind.name][key] = slim
        self._index(kind, key, slim)
        if kind is not kinds.NODE or known is None or _node_ready(known) != _node_ready(slim):
            self._wake(kind, key, slim)

    def put_named(self, kind: Kind, known: Obj, wanted: Obj) -> None:
        """An object was found under a name that a service wants, whatever its labels say."""
        place = _place(kind, wanted)
        self.put(kind, known)
        if place is not None:
            self._of_service.setdefault(place, set()).add((kind.name, objects.name_of(known)))

    def remove(self, kind: Kind, obj: Obj) -> None:
        """An object is gone; another of its name may be there already."""
        key = (objects.namespace_of(obj), objects.name_of(obj))
        known = self._objects[kind.name].get(key)
        if known is None or objects.uid_of(known) != objects.uid_of(obj):
            return
        del self._objects[kind.name][key]
        self._heard.pop((kind.name, key), None)
        self._missed.pop((kind.name, key), None)
        self._unindex(kind, key, known)
        self._wake(kind, key, known)

    def relist(self, kind: Kind, listed: Iterable[Obj], version: int, now: float) -> None:
        """Take in a complete list, as of ``version``."""
        found = set()
        for obj in listed:
            key = (objects.namespace_of(obj), objects.name_of(obj))
            found.add(key)
            if objects.version_of(obj) > self._heard.get((kind.name, key), 0):
                self._missed.setdefault((kind.name, key), now)
            self.put(kind, obj)
        for key, known in list(self._objects[kind.name].items()):
            if key not in found and objects.version_of(known) <= version:
                self.remove(kind, known)

    def silent_since(self) -> float | None:
        """When the oldest change was listed that its watch has not told to this day."""
        return min(self._missed.values(), default=None)

    # --- what is asked -------------------------------------------------------------------

    def services(self) -> list[Obj]:
        return list(self._objects[kinds.SERVICE.name].values())

    def service(self, uid: str) -> Obj | None:
        """The service of that UID."""
        key = self._by_uid.get(uid)
        return None if key is None else self._objects[kinds.SERVICE.name].get(key)

    def observe(self, service: Obj) -> Observed:
        """Everything of one service but its Secrets and what its pods say."""
        namespace, uid = objects.namespace_of(service), objects.uid_of(service)
        owned: dict[tuple[str, str], Obj] = {}
        pods = []
        for kind, name in self._of_service.get((namespace, objects.name_of(service)), ()):
            obj = self._objects[kind].get((namespace, name))
            if obj is None:
                continue  # found under its name once, and gone since
            if kind != kinds.POD.name:
                owned[kind, name] = obj
            elif objects.label(obj, objects.LABEL_UID) == uid:
                pods.append(obj)
        nodes = None
        if self.nodes_visible:
            names = {str((pod.get("spec") or {}).get("nodeName", "")) for pod in pods}
            known = self._objects[kinds.NODE.name]
            nodes = {name: known["", name] for name in names if ("", name) in known}
        return Observed(service, owned, sorted(pods, key=objects.name_of), nodes=nodes)

    # --- inside --------------------------------------------------------------------------

    def _index(self, kind: Kind, key: Key, obj: Obj) -> None:
        if kind is kinds.SERVICE:
            self._by_uid[objects.uid_of(obj)] = key
        if kind is kinds.POD:
            node = str((obj.get("spec") or {}).get("nodeName", ""))
            self._on_node.setdefault(node, set()).add(key)
        if (place := _place(kind, obj)) is not None:
            self._of_service.setdefault(place, set()).add((kind.name, key[1]))

    def _unindex(self, kind: Kind, key: Key, obj: Obj) -> None:
        if kind is kinds.SERVICE:
            self._by_uid.pop(objects.uid_of(obj), None)
        if kind is kinds.POD:
            node = str((obj.get("spec") or {}).get("nodeName", ""))
            self._on_node.get(node, set()).discard(key)
        place = _place(kind, obj)
        if place is not None and place in self._of_service:
            self._of_service[place].discard((kind.name, key[1]))
            if not self._of_service[place]:
                del self._of_service[place]

    def _wake(self, kind: Kind, key: Key, obj: Obj) -> None:
        if kind is kinds.SERVICE:
            self._on_change(objects.uid_of(obj))
        elif kind is kinds.NODE:
            for pod_key in self._on_node.get(key[1], ()):
                pod = self._objects[kinds.POD.name][pod_key]
                self._on_change(objects.label(pod, objects.LABEL_UID))
        else:
            place = _place(kind, obj)
            service = self._objects[kinds.SERVICE.name].get(place) if place else None
            if service is not None:
                self._on_change(objects.uid_of(service))


def _place(kind: Kind, obj: Obj) -> Key | None:
    """(namespace, name) of the service that an object is of."""
    if kind in (kinds.SERVICE, kinds.NODE):
        return None
    name = objects.label(obj, objects.LABEL_INSTANCE)
    return (objects.namespace_of(obj), name) if name else None


def _slim(kind: Kind, obj: Obj) -> Obj:
    """Without what nobody here reads, the greater part of many objects.

    Items of a list come without their kind, unlike answers and events.
    """
    named = {"apiVersion": kind.api_version, "kind": kind.name}
    if kind is kinds.NODE:
        kept = ("name", "uid", "resourceVersion")
        ready = objects.condition_of(obj, "Ready")
        return {
            **named,
            "metadata": {key: objects.meta(obj).get(key) for key in kept},
            "status": {"conditions": [dict(ready)] if ready else []},
        }
    metadata = {k: v for k, v in objects.meta(obj).items() if k not in _NOT_KEPT}
    return {**obj, **named, "metadata": metadata}


def _node_ready(node: Obj) -> object:
    return objects.condition_of(node, "Ready").get("status")
