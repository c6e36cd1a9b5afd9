"""What is rendered: consistent with the topology, with itself, and with what Kubernetes takes."""

from __future__ import annotations

from typing import Any

import pytest

from stopway_core import topology
from stopway_operator import crd, diff, objects
from stopway_operator.config import OperatorConfig
from stopway_operator.render import engine, gateway, redis, secrets
from stopway_operator.render.context import GRACE_MARGIN_S, Context, quantity

TOKENS = ("secret-token", "key-token", "gateway-token", "engine-token")


def context(**spec: Any) -> Context:
    spec.setdefault("model", {"uri": "builtin:smollm2"})
    return Context(
        "chat", "prod", "uid-1", crd.InferenceServiceSpec.model_validate(spec), OperatorConfig()
    )


def everything(made: Context) -> list[dict[str, Any]]:
    found = [*redis.redis_objects(made), *engine.shared_objects(made)]
    found += gateway.gateway_objects(made)
    for group in made.groups:
        found.append(engine.stateful_set(made, group, len(group.pods), {}, "r1"))
        found += engine.group_objects(made, group)
    return found


def env_of(template: dict[str, Any], fields: dict[str, str]) -> dict[str, str]:
    """As a kubelet gives it to a pod; values from Secrets stay out."""
    found = {}
    for entry in template["spec"]["containers"][0]["env"]:
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        elif "fieldRef" in entry["valueFrom"]:
            found[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return found


@pytest.mark.parametrize(("tensor", "pipeline", "per_pod"), [(1, 1, 0), (2, 2, 2), (2, 3, 1)])
def test_a_pod_is_told_exactly_what_the_topology_says(
    tensor: int, pipeline: int, per_pod: int
) -> None:
    made = context(
        parallelism={"tensor": tensor, "pipeline": pipeline, "ranksPerPod": per_pod},
        replicas=2,
        engine={"kvBlocks": 64},
        stop={"policy": "vllm", "drainSeconds": 7},
    )
    for group in made.groups:
        rendered = engine.stateful_set(made, group, len(group.pods), {}, "r1")
        assert rendered["spec"]["replicas"] == len(group.pods)
        for pod in group.pods:
            name = f"{group.name}-{pod.index}"
            fields = {
                f"metadata.labels['{objects.LABEL_INDEX}']": str(pod.index),
                "spec.nodeName": "node-a",
                "metadata.name": name,
                "metadata.uid": "pod-uid",
            }
            told = env_of(rendered["spec"]["template"], fields)
            addresses = topology.Addresses(
                leader_host=f"{group.name}-0.{group.name}.prod.svc",
                bind_host="0.0.0.0",
                node="node-a",
                pod_name=name,
                pod_uid="pod-uid",
            )
            wanted = pod.env(addresses)
            del wanted["STOPWAY_REDIS_URL"]  # from a Secret
            assert {k: v for k, v in told.items() if k.startswith("STOPWAY_")} == wanted


def test_selectors_find_their_pods_and_nobody_else() -> None:
    made = context(replicas=2)
    templates = {}
    for obj in everything(made):
        if obj["kind"] in ("StatefulSet", "Deployment"):
            labels = obj["spec"]["template"]["metadata"]["labels"]
            templates[objects.name_of(obj)] = labels
            chosen = obj["spec"]["selector"]["matchLabels"]
            assert chosen.items() <= labels.items()
    assert set(templates) == {"chat-g0", "chat-g1", "chat-gateway", "chat-redis"}
    wanted = {
        ("Service", "chat-g0"): {"chat-g0"},
        ("Service", "chat-gateway"): {"chat-gateway"},
        ("Service", "chat-redis"): {"chat-redis"},
        ("PodDisruptionBudget", "chat-groups"): {"chat-g0", "chat-g1"},
        ("PodDisruptionBudget", "chat-gateway"): {"chat-gateway"},
        ("NetworkPolicy", "chat-g1"): {"chat-g1"},
        ("NetworkPolicy", "chat-redis"): {"chat-redis"},
    }
    for obj in everything(made):
        spec = obj["spec"]
        chosen = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": (spec.get("selector") or {}).get("matchLabels"),
            "NetworkPolicy": (spec.get("podSelector") or {}).get("matchLabels"),
        }.get(obj["kind"])
        key = (obj["kind"], objects.name_of(obj))
        if key in wanted:
            hit = {name for name, labels in templates.items() if chosen.items() <= labels.items()}
            assert hit == wanted[key], key


def test_leaders_are_found_ready_and_members_unready() -> None:
    made = context()
    services = {objects.name_of(o): o["spec"] for o in everything(made) if o["kind"] == "Service"}
    leaders, members = services["chat-leaders"], services["chat-g0"]
    assert leaders["clusterIP"] == members["clusterIP"] == "None"
    assert not leaders.get("publishNotReadyAddresses") and members["publishNotReadyAddresses"]
    assert leaders["selector"][objects.LABEL_INDEX] == "0"
    assert leaders["ports"][0]["port"] == topology.FRONT_PORT
    told = env_of(gateway.gateway_objects(made)[2]["spec"]["template"], {})
    assert told["STOPWAY_GROUPS_DNS"] == f"chat-leaders.prod.svc:{topology.FRONT_PORT}"
    assert told["STOPWAY_PORT"] == str(topology.GATEWAY_PORT)
    assert gateway.url(made) == f"http://chat-gateway.prod.svc:{topology.GATEWAY_PORT}"


def test_ports_are_the_topologys_and_probes_name_them() -> None:
    for obj in everything(context()):
        if obj["kind"] not in ("StatefulSet", "Deployment"):
            continue
        container = obj["spec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if obj["kind"] == "StatefulSet":
            assert ports == {"control": 7310, "front": 7311, "health": 7312} == engine.PORTS
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            action = probe.get("httpGet") or probe.get("tcpSocket") or {"port": "redis"}
            assert action["port"] in {*ports, "redis"}
        live = container["livenessProbe"]
        assert live["failureThreshold"] * live["periodSeconds"] >= 60  # o05
        assert live["timeoutSeconds"] >= 5


def test_pods_outlive_their_drain_and_have_no_privilege() -> None:
    made = context(stop={"drainSeconds": 100})
    for obj in everything(made):
        if obj["kind"] not in ("StatefulSet", "Deployment"):
            continue
        pod = obj["spec"]["template"]["spec"]
        if objects.label(obj, objects.LABEL_COMPONENT) != "redis":
            assert pod["terminationGracePeriodSeconds"] >= 100 + GRACE_MARGIN_S
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["shareProcessNamespace"] is True  # PID 1 would miss a SIGTERM at its start
        container = pod["containers"][0]["securityContext"]
        assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
        assert container["capabilities"] == {"drop": ["ALL"]}
        assert "/tmp" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


def test_processes_know_every_setting_that_they_are_given() -> None:
    from stopway_engine.config import PodConfig
    from stopway_gateway.config import Settings

    made = context()
    given = {
        PodConfig: engine.engine_template(made, made.pattern),
        Settings: gateway.gateway_objects(made)[2]["spec"]["template"],
    }
    for model, template in given.items():
        names = [entry["name"] for entry in template["spec"]["containers"][0]["env"]]
        ours = {name.removeprefix("STOPWAY_").lower() for name in names if "STOPWAY_" in name}
        assert ours <= set(model.model_fields)


def test_start_waits_for_as_long_as_the_spec_says() -> None:
    template = engine.engine_template(context(engine={"startupSeconds": 1801}), context().pattern)
    probe = template["spec"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 1801


def test_gpus_and_shared_memory() -> None:
    made = context(
        parallelism={"tensor": 4, "pipeline": 2, "ranksPerPod": 4},
        engine={"device": "cuda", "sharedMemory": "8Gi"},
        podTemplate={"resources": {"limits": {"memory": "64Gi"}}},
    )
    pod = engine.engine_template(made, made.pattern)["spec"]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "4", "memory": "64Gi"}
    assert resources["requests"] == {"nvidia.com/gpu": "4"}
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


@pytest.mark.parametrize(
    ("uri", "path", "mount", "volume"),
    [
        ("pvc://claim/a/b.gguf", "/models/a/b.gguf", "/models", "persistentVolumeClaim"),
        ("hostpath:/data/b.gguf", "/models/b.gguf", "/models/b.gguf", "hostPath"),
    ],
)
def test_models_are_mounted_where_the_engine_looks(
    uri: str, path: str, mount: str, volume: str
) -> None:
    made = context(model={"uri": uri})
    pod = engine.engine_template(made, made.pattern)["spec"]
    assert made.settings.model == path
    mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}
    assert mounts["model"] == {"name": "model", "mountPath": mount, "readOnly": True}
    assert volume in next(v for v in pod["volumes"] if v["name"] == "model")


def test_a_pod_template_adds_and_cannot_break() -> None:
    made = context(
        podTemplate={
            "image": "mine:1",
            "labels": {"pod-group": "{group}", objects.LABEL_GROUP: "other"},
            "annotations": {"count": "{pods}"},
            "env": [{"name": "STOPWAY_GROUP", "value": "x"}, {"name": "HOME", "value": "/x"}],
            "schedulerName": "gang",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "containerSecurityContext": {"privileged": True},
        },
        parallelism={"pipeline": 3, "ranksPerPod": 1},
    )
    template = engine.engine_template(made, made.groups[0])
    assert template["metadata"]["labels"]["pod-group"] == "chat-g0"
    assert template["metadata"]["labels"][objects.LABEL_GROUP] == "chat-g0"
    assert template["metadata"]["annotations"] == {"count": "3"}
    pod = template["spec"]
    assert (
        pod["schedulerName"] == "gang"
        and {"key": "gpu", "operator": "Exists"} in (pod["tolerations"])
    )
    container = pod["containers"][0]
    assert container["image"] == "mine:1"
    assert container["securityContext"] == {"privileged": True}
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    fields = dict.fromkeys(engine._BY_FIELD.values(), "x")
    told = env_of(template, fields)
    assert told["STOPWAY_GROUP"] == "chat-g0" and told["HOME"] == "/x"


def test_a_cpu_limit_bounds_the_threads() -> None:
    made = context(
        parallelism={"tensor": 2}, podTemplate={"resources": {"limits": {"cpu": "5000m"}}}
    )
    assert made.settings.threads == 2


def test_only_the_group_and_the_gateways_front_reach_a_rank() -> None:
    policy = next(
        o
        for o in everything(context())
        if o["kind"] == "NetworkPolicy" and (objects.name_of(o) == "chat-g0")
    )
    group, front = policy["spec"]["ingress"]
    assert "ports" not in group and len(group["from"]) == 1
    assert [port["port"] for port in front["ports"]] == [topology.FRONT_PORT]


def test_a_node_drain_takes_group_after_group() -> None:
    budgets = [o["spec"] for o in everything(context()) if o["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 2
    for budget in budgets:
        assert budget["maxUnavailable"] == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_revision_changes_with_what_pods_run_and_with_nothing_else() -> None:
    base = engine.revision(context())
    assert base == engine.revision(context())
    for same in ({"replicas": 5}, {"gateway": {"replicas": 3}}, {"rollout": {"maxUnavailable": 2}}):
        assert engine.revision(context(**same)) == base
    for other in (
        {"podTemplate": {"image": "other"}},
        {"stop": {"policy": "vllm"}},
        {"parallelism": {"tensor": 2}},
        {"parallelism": {"tensor": 2, "ranksPerPod": 1}},
    ):
        assert engine.revision(context(**other)) != base


def test_everything_is_owned_without_holding_anything_up() -> None:
    made = context()
    for obj in [*everything(made), *secrets.wanted(made, TOKENS)]:
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == "uid-1" and owner["controller"] is True
        assert owner["blockOwnerDeletion"] is False
        assert obj["metadata"]["namespace"] == "prod"
        assert "finalizers" not in obj["metadata"]
        assert len(objects.name_of(obj)) <= 63


def test_redis_users_may_do_their_part_and_hold_no_password() -> None:
    found = {objects.name_of(s): s["stringData"] for s in secrets.wanted(context(), TOKENS)}
    acl = found["chat-redis"]["users.acl"]
    assert "gateway-token" not in acl and "engine-token" not in acl
    assert "user default off" in acl and "+@all" not in acl and "allkeys" not in acl
    assert found["chat-redis"]["engine-url"] == (
        "redis://engine:engine-token@chat-redis.prod.svc:6379/0"
    )
    assert found["chat-api-keys"]["keys"].startswith("default:admin=sk-stopway-")
    made = context(redis={"urlSecretRef": {"name": "mine"}})
    names = {objects.name_of(s) for s in secrets.wanted(made, TOKENS)}
    assert names == {"chat-secret", "chat-api-keys"}
    assert made.redis_url("engine") == ("mine", "url")


@pytest.mark.parametrize(
    ("observed", "wanted", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": ""}, True),
        ({}, {"a": "x"}, False),
        ({"cpu": "500m"}, {"cpu": "0.5"}, True),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1Gi"}, {"memory": "1G"}, False),
        ({"l": [{"a": 1, "x": 0}]}, {"l": [{"a": 1}]}, True),
        ({"l": [1, 2]}, {"l": [1]}, False),
        (
            {"ownerReferences": [{"uid": "1"}, {"uid": "2"}]},
            {"ownerReferences": [{"uid": "2"}]},
            True,
        ),
    ],
)
def test_defaults_of_the_api_server_are_no_difference(
    observed: dict[str, Any], wanted: dict[str, Any], same: bool
) -> None:
    assert diff.covers(observed, wanted) is same


def test_quantities() -> None:
    assert quantity("1500m") == 1.5
    assert quantity(2) == 2.0
    assert quantity("2Ki") == 2048.0
    assert quantity("many") is None
