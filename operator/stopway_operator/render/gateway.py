"""The gateway: a Deployment, a Service, a disruption budget."""

from __future__ import annotations

from stopway_core.topology import FRONT_PORT, GATEWAY_PORT
from stopway_operator import kinds, objects
from stopway_operator.objects import Obj
from stopway_operator.render.context import Context
from stopway_operator.render.pods import Parts, http_probe, pod_template, secret_env

ANNOTATION_KEYS = "stopway.dev/api-keys-version"
PRESTOP_S = 3  # until every node has stopped routing to a pod that will go


def url(context: Context) -> str:
    """Where the API is, inside of the cluster."""
    return f"http://{context.host(context.gateway)}:{GATEWAY_PORT}"


def gateway_objects(context: Context) -> list[Obj]:
    """All of them."""
    selector = context.selector(objects.GATEWAY)
    gateway = context.spec.gateway
    service = context.object(
        kinds.K8S_SERVICE,
        context.gateway,
        objects.GATEWAY,
        spec={
            "type": gateway.service.type,
            "selector": selector,
            "ports": [
                {
                    "name": "http",
                    "port": GATEWAY_PORT,
                    "targetPort": GATEWAY_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    )
    if gateway.service.annotations:
        service["metadata"]["annotations"] = dict(gateway.service.annotations)
    budget = context.object(
        kinds.PDB,
        context.gateway,
        objects.GATEWAY,
        spec={
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector},
        },
    )
    return [service, budget, _deployment(context, selector)]


def _deployment(context: Context, selector: dict[str, str]) -> Obj:
    spec = {
        # A stream outlives no gateway: the new one is ready before the old one drains.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector},
        "template": _template(context),
    }
    if context.spec.gateway.replicas is not None:
        spec["replicas"] = context.spec.gateway.replicas
    return context.object(kinds.DEPLOYMENT, context.gateway, objects.GATEWAY, spec=spec)


def _template(context: Context) -> Obj:
    spec = context.spec
    annotations = {ANNOTATION_KEYS: context.keys_version} if context.keys_version else {}
    parts = Parts(
        component=objects.GATEWAY,
        labels=context.labels(objects.GATEWAY),
        annotations=annotations,
        image=context.config.images.gateway,
        env=_env(context),
        ports={"http": GATEWAY_PORT},
        grace_s=context.grace_s + PRESTOP_S,
        lost_s=spec.recovery.lost_node_seconds,
        lifecycle={"preStop": {"sleep": {"seconds": PRESTOP_S}}},
        # Not /readyz: without a group, a client is better off with the gateway's 503 and its
        # reason (or a short wait) than with a connection that is refused.
        probes={
            "startupProbe": http_probe(
                "/healthz", "http", periodSeconds=1, timeoutSeconds=5, failureThreshold=120
            ),
            "readinessProbe": http_probe(
                "/healthz", "http", periodSeconds=5, timeoutSeconds=5, failureThreshold=2
            ),
            "livenessProbe": http_probe(
                "/healthz", "http", periodSeconds=10, timeoutSeconds=10, failureThreshold=6
            ),
        },
        volumes=[{"name": "tmp", "emptyDir": {}}],
        mounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    return pod_template(parts, spec.gateway.pod_template)


def _env(context: Context) -> list[Obj]:
    spec = context.spec
    plain = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "STOPWAY_BIND_HOST": "0.0.0.0",
        "STOPWAY_PORT": str(GATEWAY_PORT),
        "STOPWAY_SERVICE_UID": context.uid,
        "STOPWAY_GROUPS_DNS": f"{context.host(context.leaders)}:{FRONT_PORT}",
        "STOPWAY_MODEL_NAME": context.model_name,
        "STOPWAY_DRAIN_S": str(float(spec.stop.drain_seconds)),
        "STOPWAY_OTLP_ENDPOINT": spec.tracing.otlp_endpoint,
        "STOPWAY_TRUST_TRACEPARENT": str(spec.gateway.trust_traceparent).lower(),
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        secret_env("STOPWAY_SECRET", context.service_secret, "secret"),
        secret_env("STOPWAY_API_KEYS", *context.api_keys()),
        secret_env("STOPWAY_REDIS_URL", *context.redis_url(objects.GATEWAY)),
    ]
