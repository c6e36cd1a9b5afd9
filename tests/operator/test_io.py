"""The thin part: store, queue, writes and the loop, against an API server in memory."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from stopway_operator import kinds, objects, writes
from stopway_operator.api import Api, ApiError
from stopway_operator.apply import Applier, StaleError
from stopway_operator.config import OperatorConfig, load_config
from stopway_operator.handlers import registry_of, settings
from stopway_operator.health import Health
from stopway_operator.kinds import Kind
from stopway_operator.objects import Obj
from stopway_operator.prober import Prober
from stopway_operator.reconciler import Reconciler
from stopway_operator.secret_cache import SecretCache
from stopway_operator.simulation import NAMESPACE, ConflictError, Simulation
from stopway_operator.store import Store
from stopway_operator.workqueue import WorkQueue
from stopway_operator.writes import Verb, Write

SPEC = {"model": {"uri": "builtin:smollm2"}, "replicas": 2}


class FakeApi(Api):
    """The requests of the operator, answered by a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.reads = self.writes = 0
        self.log: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.refuse: dict[str, int] = {}  # part of a path -> HTTP status
        self._marks: dict[str, str] = {}

    def _versioned(self, obj: dict[str, Any]) -> dict[str, Any]:
        """What controllers have changed has a new version."""
        metadata = {k: v for k, v in objects.meta(obj).items() if k != "resourceVersion"}
        mark = objects.digest({**obj, "metadata": metadata})
        if self._marks.get(objects.uid_of(obj)) != mark and "uid" in metadata:
            self._marks[metadata["uid"]] = mark
            obj["metadata"]["resourceVersion"] = self.simulation._next_version()
        return _copy(obj)

    def _all(self, kind: Kind) -> list[dict[str, Any]]:
        simulation = self.simulation
        if kind is kinds.SERVICE:
            return [simulation.service] if simulation.service else []
        if kind is kinds.POD:
            return list(simulation.pods.values())
        if kind is kinds.NODE:
            return [simulation._node(name) for name in simulation.capacity]
        if kind is kinds.SECRET:
            known = simulation.secrets.values()
            return [{**s, "data": dict.fromkeys(s["keys"], "eA==")} for s in known]
        return [obj for (name, _), obj in simulation.objects.items() if name == kind.name]

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Any:
        self.reads += 1
        found = [self._versioned(obj) for obj in self._all(kind)]
        for item in found:  # as an API server lists them
            item.pop("kind", None)
            item.pop("apiVersion", None)
        return found, self.simulation._version

    async def request(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        self.log.append(f"{method} {path}")
        for part, status in self.refuse.items():
            if part in path and method != "GET":
                raise ApiError(status, f"refused: {part}")
        segments = path.split("/")
        at = segments.index("namespaces")
        plural, tail = segments[at + 2], segments[at + 3 :]
        kind = next(k for k in kinds.BY_NAME.values() if k.plural == plural)
        if method == "GET":
            self.reads += 1
            for obj in self._all(kind):
                if objects.name_of(obj) == tail[0]:
                    return self._versioned(obj)
            raise ApiError(404, "not found")
        self.writes += 1
        if kind is kinds.EVENT:
            self.events.append(body)
            return body
        if tail[1:] == ["status"]:
            assert self.simulation.service is not None
            self.simulation.service["status"] = body["status"]
            self.simulation.service["metadata"]["resourceVersion"] = self.simulation._next_version()
            return self._versioned(self.simulation.service)
        return self._write(kind, method, tail[0] if tail else objects.name_of(body), body)

    def _write(self, kind: Kind, method: str, name: str, body: Any) -> Any:
        verb = {"POST": Verb.CREATE, "DELETE": Verb.DELETE}.get(method, Verb.APPLY)
        uid = objects.uid_of(body)
        seen = body.get("preconditions", {})
        if verb is Verb.DELETE:
            uid = seen["uid"]
            if name not in map(objects.name_of, self._all(kind)):
                raise ApiError(404, "not found")
        elif "kind" not in body:
            verb = Verb.PATCH
        try:
            version = seen.get("resourceVersion", "")
            self.simulation.write(Write(verb, kind, NAMESPACE, name, uid, body, version=version))
        except ConflictError:
            raise ApiError(409, "conflict") from None
        if verb is Verb.DELETE:
            return {"kind": "Status"}
        return next(self._versioned(o) for o in self._all(kind) if objects.name_of(o) == name)


_copy = copy.deepcopy


def make(simulation: Simulation) -> tuple[FakeApi, Reconciler]:
    api = FakeApi(simulation)
    return api, Reconciler(api, OperatorConfig(resync_s=5), None)


async def drive(simulation: Simulation, reconciler: Reconciler, seconds: int) -> None:
    """Relists stand in for watches."""
    for _ in range(seconds):
        await reconciler.relist()
        for service in reconciler.store.services():
            try:
                await reconciler.reconcile(objects.uid_of(service))
            except StaleError:
                continue
        simulation.tick()


async def test_the_loop_brings_a_service_up_and_then_writes_nothing() -> None:
    simulation = Simulation()
    api, reconciler = make(simulation)
    simulation.create("chat", SPEC)
    await drive(simulation, reconciler, 20)
    assert simulation.service is not None
    assert objects.is_true(simulation.service, "Ready"), simulation.summary()
    assert {event["reason"] for event in api.events} == {"Serving"}
    before = api.writes
    await drive(simulation, reconciler, 20)
    assert api.writes == before
    await reconciler.close()


async def test_a_rollout_and_a_scale_down_through_the_loop() -> None:
    simulation = Simulation()
    _, reconciler = make(simulation)
    simulation.create("chat", SPEC)
    await drive(simulation, reconciler, 15)
    simulation.change(replicas=1, podTemplate={"image": "next"})
    await drive(simulation, reconciler, 40)
    assert sorted(p for p in simulation.pods if "-g" in p and "gateway" not in p) == ["chat-g0-0"]
    assert simulation.pods["chat-g0-0"]["spec"]["containers"][0]["image"] == "next"
    await reconciler.close()


async def test_a_refused_write_is_told_and_stops_no_other() -> None:
    simulation = Simulation()
    api, reconciler = make(simulation)
    api.refuse = {"networkpolicies": 403}
    simulation.create("chat", SPEC)
    await drive(simulation, reconciler, 3)
    assert ("StatefulSet", "chat-g0") in simulation.objects
    assert simulation.service is not None
    degraded = objects.condition_of(simulation.service, "Degraded")
    assert degraded["reason"] == "WriteRefused" and "networkpolicies" in degraded["message"]
    await reconciler.close()


async def test_an_api_server_that_is_away_is_tried_again() -> None:
    simulation = Simulation()
    api, reconciler = make(simulation)
    simulation.create("chat", SPEC)
    await reconciler.relist()
    uid = objects.uid_of(reconciler.store.services()[0])
    api.refuse = {"/": 503}
    with pytest.raises(ApiError):
        await reconciler.reconcile(uid)
    assert [reconciler._backoff(uid) for _ in range(3)] == [0.5, 1.0, 2.0]
    api.refuse = {}
    await drive(simulation, reconciler, 15)
    assert simulation.service is not None and objects.is_true(simulation.service, "Ready")
    await reconciler.close()


async def test_somebody_elses_object_is_found_before_it_is_written() -> None:
    simulation = Simulation()
    api, reconciler = make(simulation)
    theirs = {
        "kind": "Service",
        "metadata": {"name": "chat-gateway", "namespace": NAMESPACE, "uid": "theirs"},
        "spec": {"selector": {"app": "theirs"}},
    }
    simulation.create("chat", SPEC)
    await reconciler.relist()
    simulation.objects["Service", "chat-gateway"] = theirs
    uid = objects.uid_of(reconciler.store.services()[0])
    with pytest.raises(StaleError):
        await reconciler.reconcile(uid)
    await reconciler.reconcile(uid)
    assert simulation.objects["Service", "chat-gateway"] is theirs
    assert theirs["spec"] == {"selector": {"app": "theirs"}}
    assert not any("PATCH" in line and "services/chat-gateway" in line for line in api.log)
    await reconciler.close()


async def test_a_deletion_that_was_seen_nowhere_is_noticed_by_the_write() -> None:
    simulation = Simulation()
    api = FakeApi(simulation)
    store = Store(lambda uid: None)
    applier = Applier(api, store, SecretCache(api, 5))
    simulation.create("chat", SPEC)
    simulation.reconcile()
    seen = _copy(simulation.objects["StatefulSet", "chat-g1"])
    store.put(kinds.STATEFUL_SET, seen)
    del simulation.objects["StatefulSet", "chat-g1"]
    with pytest.raises(StaleError):
        await applier.write(writes.patch(kinds.STATEFUL_SET, seen, {"spec": {"replicas": 0}}))
    assert store.observe(simulation.service or {}).find(kinds.STATEFUL_SET, "chat-g1") is None
    await applier.write(writes.delete(kinds.STATEFUL_SET, seen))  # gone already: fine


async def test_a_deletion_by_force_is_only_of_the_state_that_was_seen() -> None:
    """A pod of a node that has come back says so in its status, and is looked at again."""
    simulation = Simulation()
    api = FakeApi(simulation)
    store = Store(lambda uid: None)
    applier = Applier(api, store, SecretCache(api, 5))
    simulation.create("chat", SPEC)
    simulation.run(3)
    listed, version = await api.list(kinds.POD, None)
    store.relist(kinds.POD, listed, version, 0.0)
    before = simulation.pods["chat-g0-0"]
    lost = next(p for p in listed if objects.name_of(p) == "chat-g0-0")
    before["status"]["phase"] = "Unheard of"
    before["metadata"]["resourceVersion"] = simulation._next_version()
    with pytest.raises(StaleError):
        await applier.write(writes.delete(kinds.POD, lost, force=True))
    assert simulation.pods["chat-g0-0"] is before
    pods = {objects.name_of(p): p for p in store.observe(simulation.service or {}).pods}
    assert pods["chat-g0-0"]["status"]["phase"] == "Unheard of"
    await applier.write(writes.delete(kinds.POD, pods["chat-g0-0"], force=True))
    assert "chat-g0-0" not in simulation.pods


class SlowProber(Prober):
    """Something happens while it is waited for."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    async def gateways(self, pods: Iterable[Obj], now: float) -> dict[str, Sequence[str]]:
        await asyncio.sleep(0)
        self._happens()
        return await super().gateways(pods, now)


def during_a_probe(change: Callable[[Simulation], None]) -> tuple[Simulation, FakeApi, Reconciler]:
    """A service that is written for the first time, and changed after the operator has looked."""
    simulation = Simulation()
    api, reconciler = make(simulation)
    simulation.create("chat", {**SPEC, "podTemplate": {"image": "before"}})

    def happens() -> None:
        change(simulation)
        assert simulation.service is not None
        reconciler.store.put(kinds.SERVICE, api._versioned(simulation.service))

    reconciler._prober = SlowProber(happens)
    return simulation, api, reconciler


async def test_what_changes_while_it_looks_is_what_it_plans_on() -> None:
    def change(simulation: Simulation) -> None:
        simulation.change(podTemplate={"image": "after"})

    simulation, _, reconciler = during_a_probe(change)
    await reconciler.relist()
    await reconciler.reconcile(objects.uid_of(reconciler.store.services()[0]))
    template = simulation.objects["StatefulSet", "chat-g0"]["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == "after"
    assert simulation.service is not None
    assert simulation.service["status"]["observedGeneration"] == 2
    await reconciler.close()


async def test_a_service_that_goes_while_it_looks_is_left_alone() -> None:
    def change(simulation: Simulation) -> None:
        assert simulation.service is not None
        simulation.service["metadata"]["deletionTimestamp"] = objects.timestamp(simulation.now)

    simulation, api, reconciler = during_a_probe(change)
    await reconciler.relist()
    assert await reconciler.reconcile(objects.uid_of(reconciler.store.services()[0])) is None
    assert not simulation.objects and api.writes == 0
    await reconciler.close()


async def test_secrets_that_are_named_while_it_looks_are_read_before_it_plans() -> None:
    def change(simulation: Simulation) -> None:
        simulation.change(gateway={"apiKeysSecretRef": {"name": "mine"}})

    simulation, api, reconciler = during_a_probe(change)
    mine = {"name": "mine", "namespace": NAMESPACE, "uid": "s", "resourceVersion": "1"}
    simulation.secrets["mine"] = {"metadata": mine, "keys": ["keys"]}
    await reconciler.relist()
    uid = objects.uid_of(reconciler.store.services()[0])
    with pytest.raises(StaleError):
        await reconciler.reconcile(uid)
    assert api.writes == 0
    await reconciler.reconcile(uid)
    assert simulation.service is not None
    degraded = objects.condition_of(simulation.service, "Degraded")
    assert degraded["reason"] != "SecretMissing"
    await reconciler.close()


async def test_secrets_are_read_by_name_and_their_values_forgotten() -> None:
    simulation = Simulation()
    api = FakeApi(simulation)
    simulation.create("chat", SPEC)
    simulation.reconcile()
    cache = SecretCache(api, 60)
    found = await cache.read(NAMESPACE, ["chat-secret", "other"], 100.0)
    assert set(found) == {"chat-secret"} and "data" not in found["chat-secret"]
    reads = api.reads
    await cache.read(NAMESPACE, ["chat-secret"], 130.0)
    assert api.reads == reads
    await cache.read(NAMESPACE, ["chat-secret"], 161.0)
    assert api.reads == reads + 1


def pod(name: str, version: int, uid: str = "u1", **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    known = {objects.LABEL_INSTANCE: "chat", objects.LABEL_UID: "s1", **labels}
    return {"kind": "Pod", "metadata": {**metadata, "labels": known}, "spec": {"nodeName": "n1"}}


SERVICE = {"metadata": {"name": "chat", "namespace": "ns", "uid": "s1", "resourceVersion": "1"}}


def test_the_store_only_goes_forward_and_knows_pods_by_uid() -> None:
    woken: list[str] = []
    store = Store(woken.append)
    store.put(kinds.SERVICE, SERVICE)
    store.put(kinds.POD, pod("a", 5))
    store.put(kinds.POD, pod("a", 4))
    assert objects.version_of(store.observe(SERVICE).pods[0]) == 5
    store.put(kinds.POD, pod("a", 9, uid="u2"))  # recreated under its name
    store.remove(kinds.POD, pod("a", 7))  # the late news of the first one's end
    assert [objects.uid_of(p) for p in store.observe(SERVICE).pods] == ["u2"]
    service = store.service("s1")
    assert set(woken) == {"s1"} and service is not None and service["kind"] == kinds.SERVICE.name


def test_a_relist_finds_what_a_watch_has_missed() -> None:
    """o02: kopf tells of no deletion that happened while its watch was away."""
    store = Store(lambda uid: None)
    store.put(kinds.SERVICE, SERVICE)
    store.put(kinds.POD, pod("a", 5), watched=True)
    store.put(kinds.POD, pod("b", 20), watched=True)  # newer than the list
    store.relist(kinds.POD, [pod("c", 12)], version=15, now=100.0)
    assert [objects.name_of(p) for p in store.observe(SERVICE).pods] == ["b", "c"]
    assert store.silent_since() == 100.0  # nobody has told of c
    store.put(kinds.POD, pod("c", 12), watched=True)
    assert store.silent_since() is None


def test_a_node_wakes_the_services_on_it_when_its_readiness_changes() -> None:
    woken: list[str] = []
    store = Store(woken.append)
    store.nodes_visible = True
    store.put(kinds.POD, pod("a", 5))

    def node(version: int, status: str) -> dict[str, Any]:
        ready = [{"type": "Ready", "status": status}, {"type": "DiskPressure", "status": "False"}]
        metadata = {"name": "n1", "resourceVersion": str(version), "labels": {"big": "yes"}}
        return {"metadata": metadata, "status": {"conditions": ready, "images": ["many"]}}

    store.put(kinds.NODE, node(1, "True"))
    woken.clear()
    store.put(kinds.NODE, node(2, "True"))
    assert not woken
    store.put(kinds.NODE, node(3, "Unknown"))
    assert woken == ["s1"]
    seen = store.observe(SERVICE).nodes
    assert seen is not None and "images" not in seen["n1"]["status"]


async def test_the_queue_coalesces_delays_and_never_doubles() -> None:
    queue = WorkQueue(time.monotonic)
    queue.add("a", 0.05)
    queue.add("a", 0.0)
    queue.add("b", 0.02)
    assert await queue.take() == "a"
    queue.add("a")
    assert await queue.take() == "b"  # "a" is being worked on
    taken = asyncio.create_task(queue.take())
    await asyncio.sleep(0.01)
    assert not taken.done()
    queue.done("a")
    assert await taken == "a" and len(queue) == 0


async def test_liveness_is_tied_to_watches_and_lists() -> None:
    simulation = Simulation()
    api, reconciler = make(simulation)
    health = Health(reconciler, api, resync_s=60)
    now = time.monotonic()
    assert health.problem(now) == ""
    assert "no list" in health.problem(now + 601)
    simulation.create("chat", SPEC)
    await reconciler.relist()
    assert health.problem(time.monotonic()) == ""
    assert "a watch has not told" in health.problem(time.monotonic() + 151)
    await reconciler.close()


def test_kopf_only_watches() -> None:
    store = Store(lambda uid: None)
    assert len(registry_of(store)._watching.get_all_handlers()) == len(kinds.WATCHED) - 1
    store.nodes_visible = True
    registry = registry_of(store)
    assert len(registry._watching.get_all_handlers()) == len(kinds.WATCHED)
    for part in (registry._changing, registry._spawning, registry._indexing):
        assert not part.get_all_handlers()  # nothing that needs a finalizer
    made = settings()
    assert not made.posting.enabled and made.watching.inactivity_timeout < 120
    assert len(made.watching.label_selectors) == len(kinds.APPLIED) + 1


def test_settings_come_from_the_environment() -> None:
    config = load_config({"STOPWAY_OPERATOR_ENGINE_IMAGE": "e:1", "STOPWAY_OPERATOR_RESYNC_S": "7"})
    assert config.images.engine == "e:1" and config.resync_s == 7.0
    assert config.images.redis == OperatorConfig().images.redis
    with pytest.raises(ValueError):
        load_config({"STOPWAY_OPERATOR_WORKERS": "many"})


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (kinds.POD, "/api/v1/namespaces/ns/pods/x"),
        (kinds.NODE, "/api/v1/nodes/x"),
        (kinds.SERVICE, "/apis/serving.stopway.dev/v1alpha1/namespaces/ns/inferenceservices/x"),
    ],
)
def test_paths(kind: Kind, path: str) -> None:
    assert kind.path("ns", "x") == path
