"""The objects of groups: StatefulSets, their Services, policies, and the disruption budget."""

from __future__ import annotations

from stopway_core import topology
from stopway_core.topology import CONTROL_PORT, FRONT_PORT, HEALTH_PORT, Addresses, GroupPlan
from stopway_operator import kinds, objects
from stopway_operator.objects import Obj
from stopway_operator.render.context import Context
from stopway_operator.render.model import model_volume
from stopway_operator.render.pods import (
    Parts,
    field_env,
    http_probe,
    pod_template,
    secret_env,
)

STARTUP_PERIOD_S = 5
PORTS = {"control": CONTROL_PORT, "front": FRONT_PORT, "health": HEALTH_PORT}

# A pod says these itself, so that one template serves all pods of a group.
_BY_FIELD = {
    "STOPWAY_POD_INDEX": f"metadata.labels['{objects.LABEL_INDEX}']",
    "STOPWAY_NODE": "spec.nodeName",
    "STOPWAY_POD_NAME": "metadata.name",
    "STOPWAY_POD_UID": "metadata.uid",
}


def leader_host(context: Context, group: str) -> str:
    """The leader's name: pod 0 under the group's headless Service."""
    return f"{group}-0.{context.host(group)}"


def engine_template(context: Context, group: GroupPlan) -> Obj:
    """The pod template of a group, without its revision."""
    spec = context.spec
    volumes, mounts = model_volume(spec.model.uri)
    limits = {}
    if spec.engine.device == "cuda":
        limits[spec.engine.gpu_resource] = str(context.ranks_per_pod)
    parts = Parts(
        component=objects.ENGINE,
        labels=context.labels(objects.ENGINE, group.name),
        image=context.config.images.engine,
        env=_env(context, group),
        ports=PORTS,
        grace_s=context.grace_s,
        lost_s=spec.recovery.lost_node_seconds,
        group=group.name,
        pods=len(group.pods),
        probes=_probes(spec.engine.startup_seconds),
        limits=limits,
        volumes=[
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": spec.engine.shared_memory},
            },
            *volumes,
        ],
        mounts=[
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *mounts,
        ],
    )
    return pod_template(parts, spec.pod_template)


def _env(context: Context, group: GroupPlan) -> list[Obj]:
    """The topology's environment of any pod of the group; what differs by pod, by reference."""
    addresses = Addresses(leader_host=leader_host(context, group.name), bind_host="0.0.0.0")
    secret, key = context.redis_url(objects.ENGINE)
    by_secret = {
        "STOPWAY_SECRET": secret_env("STOPWAY_SECRET", context.service_secret, "secret"),
        "STOPWAY_REDIS_URL": secret_env("STOPWAY_REDIS_URL", secret, key),
    }
    # Libraries ask who they are and where they may write; the image knows no user 10001.
    plain = {"HOME": "/tmp", "USER": "stopway", "PYTHONUNBUFFERED": "1"}
    env: list[Obj] = [{"name": name, "value": value} for name, value in plain.items()]
    for name, value in {"STOPWAY_SECRET": "", **group.pods[0].env(addresses)}.items():
        if name in _BY_FIELD:
            env.append(field_env(name, _BY_FIELD[name]))
        elif name in by_secret:
            env.append(by_secret[name])
        else:
            env.append({"name": name, "value": value})
    return env


def _probes(startup_seconds: int) -> Obj:
    """Start: the process answers, however late. Ready: a complete epoch. Alive: no long silence.

    The start probe does not wait for readiness: the kubelet would then restart the pods of a group
    that waits for its last member. A hung rank is the business of ``supervise``.
    """
    return {
        "startupProbe": http_probe(
            "/healthz",
            "health",
            periodSeconds=STARTUP_PERIOD_S,
            timeoutSeconds=5,
            failureThreshold=-(-startup_seconds // STARTUP_PERIOD_S),
        ),
        "readinessProbe": http_probe(
            "/readyz", "health", periodSeconds=2, timeoutSeconds=5, failureThreshold=2
        ),
        "livenessProbe": http_probe(
            "/healthz", "health", periodSeconds=10, timeoutSeconds=10, failureThreshold=6
        ),
    }


def revision(context: Context) -> str:
    """What all pods of a group must have alike: a digest of the template and of their number."""
    return objects.digest(
        [engine_template(context, context.pattern), len(context.pattern.pods)], 10
    )


def stateful_set(
    context: Context,
    group: GroupPlan,
    replicas: int,
    annotations: dict[str, str],
    wanted_revision: str,
) -> Obj:
    """The StatefulSet of a group, as of the revision that ``revision`` says."""
    template = engine_template(context, group)
    template["metadata"]["labels"][objects.LABEL_REVISION] = wanted_revision
    found = context.object(
        kinds.STATEFUL_SET,
        group.name,
        objects.ENGINE,
        group.name,
        spec={
            "replicas": replicas,
            "serviceName": group.name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": context.selector(objects.ENGINE, group.name)},
            "template": template,
        },
    )
    if annotations:
        found["metadata"]["annotations"] = dict(annotations)
    return found


def group_objects(context: Context, group: GroupPlan) -> list[Obj]:
    """What a group has beside its StatefulSet."""
    mine = context.selector(objects.ENGINE, group.name)
    service = context.object(
        kinds.K8S_SERVICE,
        group.name,
        objects.ENGINE,
        group.name,
        spec={
            "clusterIP": "None",
            # Members look each other up before they are ready.
            "publishNotReadyAddresses": True,
            "selector": mine,
            "ports": [_port("control", CONTROL_PORT)],
        },
    )
    gateways = {"podSelector": {"matchLabels": context.selector(objects.GATEWAY)}}
    operator = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": context.config.namespace}
        },
        "podSelector": {"matchLabels": {objects.LABEL_NAME: objects.MANAGER}},
    }
    policy = context.object(
        kinds.NETWORK_POLICY,
        group.name,
        objects.ENGINE,
        group.name,
        spec={
            "podSelector": {"matchLabels": mine},
            "policyTypes": ["Ingress"],
            "ingress": [
                # Stores, gloo and NCCL authenticate nobody: only the group itself reaches them.
                {"from": [{"podSelector": {"matchLabels": mine}}]},
                {
                    "from": [gateways, operator],
                    "ports": [{"protocol": "TCP", "port": FRONT_PORT}],
                },
            ],
        },
    )
    return [service, policy]


def shared_objects(context: Context) -> list[Obj]:
    """What the groups have together."""
    leaders = context.object(
        kinds.K8S_SERVICE,
        context.leaders,
        objects.ENGINE,
        spec={
            "clusterIP": "None",
            "selector": {**context.selector(objects.ENGINE), objects.LABEL_INDEX: "0"},
            "ports": [_port("front", FRONT_PORT)],
        },
    )
    # A group that has lost one pod is down as a whole, so the rest of it may go as well
    # (AlwaysAllow), while no pod of another group may: a node drain takes group after group, and
    # never waits for a group to get well on a node that it must leave.
    budget = context.object(
        kinds.PDB,
        f"{context.name}-groups",
        objects.ENGINE,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": context.selector(objects.ENGINE)},
        },
    )
    return [leaders, budget]


def scale_selector(context: Context) -> str:
    """Selects one pod of each group."""
    labels = {**context.selector(objects.ENGINE), objects.LABEL_INDEX: "0"}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _port(name: str, port: int) -> Obj:
    return {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}


def group_name(context: Context, index: int) -> str:
    """The name of a group by its index, as the topology has it."""
    return context.pattern.name.removesuffix("0") + str(index)


def group_index(context: Context, name: str) -> int | None:
    """The index of a group by its name, or None for a name that is not one."""
    prefix = context.pattern.name.removesuffix("0")
    tail = name.removeprefix(prefix)
    return int(tail) if name.startswith(prefix) and tail.isdecimal() else None


def plan_of(context: Context, name: str) -> topology.GroupPlan | None:
    """The plan of a wanted group."""
    return next((group for group in context.groups if group.name == name), None)
