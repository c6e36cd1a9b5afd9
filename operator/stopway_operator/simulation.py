"""A tiny cluster in memory, for tests and the bench: API server, controllers, kubelets, one clock.

It is as faithful as the operator's decisions need: UIDs, versions, preconditions, defaults, a
StatefulSet controller that recreates pods under their names, nodes with room or without, images
that do not start, groups that are ready only as a whole. It runs one namespace with one service.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from stopway_operator import crd, kinds, objects
from stopway_operator.config import OperatorConfig
from stopway_operator.objects import Obj
from stopway_operator.observed import Observed, pod_ready
from stopway_operator.plan import Plan, plan
from stopway_operator.writes import Verb, Write

NAMESPACE = "default"
START = 1_800_000_000.0
TOKENS = ("service-secret", "api-key", "gateway-password", "engine-password")


class ConflictError(Exception):
    """A precondition did not hold."""


@dataclass
class Simulation:
    """``bad_images`` never start; ``drain_s`` is how long a pod takes to go.

    ``find_s`` after a group is ready, gateways have found it.
    """

    config: OperatorConfig = field(default_factory=OperatorConfig)
    drain_s: float = 3.0
    load_s: float = 5.0
    find_s: float = 2.0
    bad_images: set[str] = field(default_factory=set)
    capacity: dict[str, int] = field(default_factory=lambda: {f"n{i}": 32 for i in range(1, 4)})
    now: float = START
    writes: int = 0

    def __post_init__(self) -> None:
        self.objects: dict[tuple[str, str], Obj] = {}
        self.pods: dict[str, Obj] = {}
        self.secrets: dict[str, Obj] = {}
        self.lost: dict[str, float] = {}
        self.service: Obj | None = None
        self._uid = self._version = 0
        self._ready_at: dict[str, float] = {}
        self._gone_at: dict[str, float] = {}
        self._whole_since: dict[str, float] = {}

    # --- a person ------------------------------------------------------------------------

    def create(self, name: str, spec: Obj) -> Obj:
        """``kubectl apply`` of a service; defaults are filled in as the API server does."""
        full = crd.InferenceServiceSpec.model_validate(spec)
        metadata = self._metadata({"name": name, "namespace": NAMESPACE, "generation": 1})
        filled = full.model_dump(by_alias=True, exclude_none=True)
        self.service = {"kind": crd.KIND, "metadata": metadata, "spec": filled}
        return self.service

    def change(self, **parts: object) -> None:
        """``kubectl patch``: parts of the spec, by their Python names."""
        assert self.service is not None
        spec = crd.InferenceServiceSpec.model_validate({**self.service["spec"], **parts})
        self.service["spec"] = spec.model_dump(by_alias=True, exclude_none=True)
        self.service["metadata"]["generation"] += 1

    def delete(self) -> None:
        """``kubectl delete``: the garbage collector follows the owner references."""
        self.service = None

    def delete_pod(self, name: str) -> None:
        """``kubectl delete pod``."""
        self._terminate(self.pods[name])

    def lose(self, node: str) -> None:
        """Power off."""
        self.lost[node] = self.now

    def restore(self, node: str) -> None:
        """Power on: what the API server does not know any more is gone from it."""
        del self.lost[node]

    # --- the operator's side -------------------------------------------------------------

    def observe(self) -> Observed:
        assert self.service is not None
        uid = objects.uid_of(self.service)
        mine = [p for p in self.pods.values() if objects.label(p, objects.LABEL_UID) == uid]
        view = Observed(
            service=self.service,
            objects=self.objects,
            pods=sorted(mine, key=objects.name_of),
            secrets=self.secrets,
            nodes={name: self._node(name) for name in self.capacity},
            epochs={
                objects.uid_of(self.pods[f"{group}-0"]): int(1000 * since)
                for group, since in self._whole_since.items()
                if f"{group}-0" in self.pods
            },
            gateways={
                objects.uid_of(pod): self.listed()
                for pod in mine
                if objects.label(pod, objects.LABEL_COMPONENT) == objects.GATEWAY and pod_ready(pod)
            },
        )
        return copy.deepcopy(view)

    def listed(self) -> list[str]:
        """The groups that gateways can send to."""
        return [g for g, since in self._whole_since.items() if self.now >= since + self.find_s]

    def plan(self) -> Plan:
        return plan(self.observe(), self.config, self.now, TOKENS)

    def reconcile(self, writes_max: int | None = None) -> Plan:
        """One reconcile; the operator dies after ``writes_max`` writes."""
        if self.service is None:
            return Plan()
        planned = self.plan()
        todo = list(planned.writes)[:writes_max]
        for write in todo:
            self.write(write)
        alive = writes_max is None or len(todo) < writes_max
        if planned.status is not None and alive and self.service is not None:
            self.writes += 1
            self.service["status"] = planned.status
        return planned

    def write(self, write: Write) -> None:
        """One request. Raises ``ConflictError``."""
        self.writes += 1
        if write.kind is kinds.POD:
            self._delete_pod_by_force(write)
        elif write.kind is kinds.SECRET:
            if write.name in self.secrets:
                raise ConflictError(write.name)
            made = {k: v for k, v in write.body.items() if k != "stringData"}
            made["metadata"] = self._metadata(write.body["metadata"])
            self.secrets[write.name] = {**made, "keys": sorted(write.body["stringData"])}
        else:
            self._write_object(write)

    def _write_object(self, write: Write) -> None:
        key = (write.kind.name, write.name)
        known = self.objects.get(key)
        if write.uid and (known is None or objects.uid_of(known) != write.uid):
            raise ConflictError(write.name)
        if write.verb is Verb.DELETE:
            del self.objects[key]
        elif write.verb is Verb.PATCH:
            assert known is not None
            known["spec"] |= write.body["spec"]
            known["metadata"]["generation"] += 1
            known["metadata"]["resourceVersion"] = self._next_version()
        else:
            self.objects[key] = self._stored(write.body, known)

    def _stored(self, body: Obj, known: Obj | None) -> Obj:
        """As an API server keeps it: without what is empty, with defaults."""
        made = _without_empty(copy.deepcopy(body))
        made["metadata"] = self._metadata(made["metadata"], known)
        if body["kind"] in ("StatefulSet", "Deployment"):
            before = known["spec"].get("replicas", 1) if known else 1
            made["spec"]["replicas"] = body["spec"].get("replicas", before)
            made["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"
        if known and "status" in known:
            made["status"] = known["status"]
        return made

    def _delete_pod_by_force(self, write: Write) -> None:
        pod = self.pods.get(write.name)
        seen = (write.uid, write.version)
        if pod is None or (objects.uid_of(pod), pod["metadata"]["resourceVersion"]) != seen:
            raise ConflictError(write.name)
        del self.pods[write.name]

    # --- time ----------------------------------------------------------------------------

    def tick(self, seconds: float = 1.0) -> None:
        """Controllers and kubelets do what they do in ``seconds``."""
        self.now += seconds
        self._garbage()
        for (kind, name), obj in list(self.objects.items()):
            if kind == "StatefulSet":
                self._stateful_set(name, obj)
            elif kind == "Deployment":
                self._deployment(name, obj)
        for pod in list(self.pods.values()):
            self._kubelet(pod)
        self._readiness()
        for (kind, name), obj in self.objects.items():
            if kind == "Deployment":
                self._deployment_status(name, obj)

    def run(self, seconds: float, step: float = 1.0) -> None:
        """Time passes, with a reconcile at each step."""
        end = self.now + seconds
        while self.now < end:
            self.reconcile()
            self.tick(step)

    def settle(self, rounds: int = 400) -> int:
        """Reconcile and tick until nothing is to be done; the number of rounds."""
        for count in range(rounds):
            planned = self.reconcile()
            if planned.idle and planned.requeue_s is None:
                return count
            self.tick()
        raise AssertionError(f"not settled: {self.summary()}")

    def summary(self) -> Obj:
        """For the message of a failed test."""
        status = (self.service or {}).get("status", {})
        return {
            "conditions": {c["type"]: c["reason"] for c in status.get("conditions", ())},
            "groups": [(g["name"], g["phase"], g["message"]) for g in status.get("groups", ())],
            "pods": sorted(self.pods),
        }

    # --- controllers ---------------------------------------------------------------------

    def _garbage(self) -> None:
        uid = objects.uid_of(self.service) if self.service else ""
        for key, obj in list(self.objects.items()):
            owner = objects.controller_of(obj)
            if owner.get("kind") == crd.KIND and owner.get("uid") != uid:
                del self.objects[key]
        for name, secret in list(self.secrets.items()):
            if objects.controller_of(secret) and objects.controller_of(secret)["uid"] != uid:
                del self.secrets[name]
        live = {objects.uid_of(obj) for obj in self.objects.values()}
        for pod in self.pods.values():
            if objects.controller_of(pod).get("uid") not in live:
                self._terminate(pod)

    def _stateful_set(self, name: str, obj: Obj) -> None:
        replicas = obj["spec"]["replicas"]
        for index in range(replicas):
            if f"{name}-{index}" not in self.pods:
                self._new_pod(f"{name}-{index}", obj, {objects.LABEL_INDEX: str(index)})
        mine = [p for p in self.pods.values() if self._owned(p, obj)]
        for pod in mine:
            if int(objects.name_of(pod).rpartition("-")[2]) >= replicas:
                self._terminate(pod)
        generation = objects.meta(obj)["generation"]
        obj["status"] = {"observedGeneration": generation, "replicas": len(mine)}

    def _deployment(self, name: str, obj: Obj) -> None:
        mark = objects.digest(obj["spec"]["template"], 8)
        mine = [p for p in self.pods.values() if self._owned(p, obj)]
        live = [p for p in mine if not objects.deleting(p)]
        new = [p for p in live if objects.label(p, "pod-template-hash") == mark]
        wanted = obj["spec"]["replicas"]
        for _ in range(wanted - len(new)):
            self._uid += 1
            self._new_pod(f"{name}-{mark}-{self._uid}", obj, {"pod-template-hash": mark})
        surplus = [p for p in live if p not in new] if all(map(pod_ready, new)) else []
        for pod in [*surplus, *new[wanted:]]:
            self._terminate(pod)

    def _deployment_status(self, name: str, obj: Obj) -> None:
        mark = objects.digest(obj["spec"]["template"], 8)
        mine = [p for p in self.pods.values() if self._owned(p, obj)]
        live = [p for p in mine if not objects.deleting(p)]
        obj["status"] = {
            "observedGeneration": objects.meta(obj)["generation"],
            "replicas": len(live),
            "updatedReplicas": sum(objects.label(p, "pod-template-hash") == mark for p in live),
            "availableReplicas": sum(map(pod_ready, live)),
        }

    def _owned(self, pod: Obj, obj: Obj) -> bool:
        return bool(objects.controller_of(pod).get("uid") == objects.uid_of(obj))

    def _new_pod(self, name: str, owner: Obj, labels: dict[str, str]) -> None:
        template = owner["spec"]["template"]
        reference = {"kind": owner["kind"], "uid": objects.uid_of(owner), "controller": True}
        metadata = self._metadata(
            {
                "name": name,
                "namespace": NAMESPACE,
                "labels": {**template["metadata"]["labels"], **labels},
                "creationTimestamp": objects.timestamp(self.now),
                "ownerReferences": [reference],
            }
        )
        self.pods[name] = {
            "kind": "Pod",
            "metadata": metadata,
            "spec": copy.deepcopy(template["spec"]),
            "status": {"phase": "Pending", "conditions": []},
        }

    # --- scheduler and kubelets ----------------------------------------------------------

    def _kubelet(self, pod: Obj) -> None:
        name, uid = objects.name_of(pod), objects.uid_of(pod)
        node = pod["spec"].get("nodeName", "")
        if objects.deleting(pod):
            gone = self.now >= self._gone_at[uid]
            if (not node or node not in self.lost) and gone:
                self.pods.pop(name, None)
            return
        if not node:
            self._schedule(pod)
            return
        if node in self.lost:
            self._set_condition(pod, "Ready", "False")
            return
        image = pod["spec"]["containers"][0]["image"]
        if image in self.bad_images:
            waiting = {"reason": "ImagePullBackOff"}
            pod["status"]["containerStatuses"] = [
                {"image": image, "ready": False, "restartCount": 0, "state": {"waiting": waiting}}
            ]
        else:
            pod["status"]["phase"] = "Running"
            self._ready_at.setdefault(uid, self.now + self.load_s)

    def _schedule(self, pod: Obj) -> None:
        used = dict.fromkeys(self.capacity, 0)
        for other in self.pods.values():
            node = other["spec"].get("nodeName")
            used[node] = used.get(node, 0) + 1
        fits = [n for n in self.capacity if n not in self.lost and used[n] < self.capacity[n]]
        if fits:
            pod["spec"]["nodeName"] = min(fits, key=lambda n: (used[n], n))
            self._set_condition(pod, "PodScheduled", "True")
        else:
            self._set_condition(pod, "PodScheduled", "False", "no node has room")

    def _readiness(self) -> None:
        """A group's pods are ready together; any other pod is by itself."""
        groups: dict[str, list[Obj]] = {}
        for pod in self.pods.values():
            groups.setdefault(objects.label(pod, objects.LABEL_GROUP), []).append(pod)
        before, self._whole_since = self._whole_since, {}
        for group, pods in groups.items():
            if not group:
                for pod in pods:
                    self._set_condition(pod, "Ready", str(self._started(pod)))
                continue
            wanted = self.objects.get(("StatefulSet", group), {}).get("spec", {}).get("replicas", 0)
            revisions = {objects.label(pod, objects.LABEL_REVISION) for pod in pods}
            whole = len(pods) == wanted and len(revisions) == 1 and all(map(self._started, pods))
            if whole:
                self._whole_since[group] = before.get(group, self.now)
            for pod in pods:
                self._set_condition(pod, "Ready", str(whole))

    def _started(self, pod: Obj) -> bool:
        if objects.deleting(pod) or pod["spec"].get("nodeName", "") in self.lost:
            return False
        return self.now >= self._ready_at.get(objects.uid_of(pod), float("inf"))

    def _terminate(self, pod: Obj) -> None:
        if not objects.deleting(pod):
            pod["metadata"]["deletionTimestamp"] = objects.timestamp(self.now + 60)
            self._gone_at[objects.uid_of(pod)] = self.now + self.drain_s

    def _set_condition(self, pod: Obj, kind: str, status: str, message: str = "") -> None:
        known = objects.condition_of(pod, kind)
        if known.get("status") == status:
            return
        others = [c for c in pod["status"]["conditions"] if c["type"] != kind]
        at = objects.timestamp(self.now)
        fresh = {"type": kind, "status": status, "lastTransitionTime": at, "message": message}
        pod["status"]["conditions"] = [*others, fresh]

    # --- metadata ------------------------------------------------------------------------

    def _node(self, name: str) -> Obj:
        at = self.lost.get(name)
        ready = {
            "type": "Ready",
            "status": "True" if at is None else "Unknown",
            "lastTransitionTime": objects.timestamp(START if at is None else at),
        }
        return {"metadata": {"name": name}, "status": {"conditions": [ready]}}

    def _metadata(self, wanted: Obj, known: Obj | None = None) -> Obj:
        if known is None:
            self._uid += 1
        return {
            "generation": objects.meta(known)["generation"] + 1 if known else 1,
            **wanted,
            "uid": objects.uid_of(known) if known else f"uid-{self._uid}",
            "resourceVersion": self._next_version(),
        }

    def _next_version(self) -> str:
        self._version += 1
        return str(self._version)


def _without_empty(value: Obj) -> Obj:
    """The API server leaves out texts, lists and maps that are empty, here and there."""

    def kept(item: object) -> object:
        if isinstance(item, dict):
            return {k: kept(v) for k, v in item.items() if v not in ("", [], None)}
        return [kept(v) for v in item] if isinstance(item, list) else item

    found = kept(value)
    assert isinstance(found, dict)
    return found
