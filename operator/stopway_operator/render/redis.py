"""The Redis that the operator runs: no disk, and a user for each role.

Users are in Redis 7's form: a permission to read or to write a key, and selectors.
"""

from __future__ import annotations

import hashlib

from stopway_core import names
from stopway_operator import kinds, objects
from stopway_operator.objects import Obj
from stopway_operator.render.context import Context
from stopway_operator.render.pods import Parts, pod_template

PORT = 6379
_CONNECT = "+ping +hello +auth +client|setname +client|id"


def users(uid: str, gateway: str, engine: str) -> str:
    """The ACL file: gateways add stops and read receipts; pods read stops, fronts add receipts.

    ``gateway`` and ``engine`` are passwords; only their digests are in the file.
    """
    stops, receipts = names.stops_stream(uid, "*"), names.receipts_stream(uid)
    both = names.gateway_stops_stream(uid)
    read, write = "+xread +xrevrange", "+xadd +xtrim"
    roles = {
        "gateway": (
            gateway,
            f"%W~{stops} %W~{receipts} +xadd",
            f"(%R~{receipts} %R~{both} {read})",
        ),
        "engine": (engine, f"%R~{stops} {read}", f"(%RW~{receipts} {write})"),
    }
    lines = ["user default off resetkeys resetchannels -@all"]
    for name, (password, rules, more) in roles.items():
        sha = hashlib.sha256(password.encode()).hexdigest()
        lines.append(
            f"user {name} on #{sha} resetkeys resetchannels -@all {_CONNECT} {rules} {more}"
        )
    return "\n".join(lines) + "\n"


def redis_url(context: Context, role: str, password: str) -> str:
    return f"redis://{role}:{password}@{context.host(context.redis)}:{PORT}/0"


def redis_objects(context: Context) -> list[Obj]:
    """All of them but the Secret."""
    selector = context.selector(objects.REDIS)
    service = context.object(
        kinds.K8S_SERVICE,
        context.redis,
        objects.REDIS,
        spec={
            "selector": selector,
            "ports": [{"name": "redis", "port": PORT, "targetPort": PORT, "protocol": "TCP"}],
        },
    )
    clients = [
        {"podSelector": {"matchLabels": context.selector(component)}}
        for component in (objects.GATEWAY, objects.ENGINE)
    ]
    policy = context.object(
        kinds.NETWORK_POLICY,
        context.redis,
        objects.REDIS,
        spec={
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": clients, "ports": [{"protocol": "TCP", "port": PORT}]}],
        },
    )
    deployment = context.object(
        kinds.DEPLOYMENT,
        context.redis,
        objects.REDIS,
        spec={
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # never two buses
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector},
            "template": _template(context),
        },
    )
    return [service, policy, deployment]


def _template(context: Context) -> Obj:
    probe = {"tcpSocket": {"port": "redis"}, "timeoutSeconds": 5}
    flags = {
        "--port": str(PORT),
        "--bind": "0.0.0.0",
        "--protected-mode": "no",
        "--aclfile": "/etc/stopway/users.acl",
        "--save": "",
        "--appendonly": "no",
        "--dir": "/tmp",
        "--databases": "1",
    }
    parts = Parts(
        component=objects.REDIS,
        labels=context.labels(objects.REDIS),
        image=context.config.images.redis,
        command=("redis-server", *(word for flag in flags.items() for word in flag)),
        env=[],
        ports={"redis": PORT},
        grace_s=5,
        lost_s=context.spec.recovery.lost_node_seconds,
        probes={
            "readinessProbe": {**probe, "periodSeconds": 2, "failureThreshold": 2},
            "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        },
        volumes=[
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "users",
                "secret": {
                    "secretName": context.redis,
                    "items": [{"key": "users.acl", "path": "users.acl"}],
                },
            },
        ],
        mounts=[
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "users", "mountPath": "/etc/stopway", "readOnly": True},
        ],
    )
    return pod_template(parts, context.spec.redis.pod_template)
