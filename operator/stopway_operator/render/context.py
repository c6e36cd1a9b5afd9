"""What every rendered object needs to know, and what all of them have alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stopway_core import topology
from stopway_operator import crd, objects
from stopway_operator.config import OperatorConfig
from stopway_operator.kinds import Kind
from stopway_operator.objects import Obj

GRACE_MARGIN_S = 30  # beyond the drain: the last turns, the front's end, telemetry


class SpecError(ValueError):
    """A spec that passes the schema and cannot work; the message says what to change."""


@dataclass(frozen=True)
class Context:
    """One service."""

    name: str
    namespace: str
    uid: str
    spec: crd.InferenceServiceSpec
    config: OperatorConfig
    keys_version: str = ""  # of the Secret with the API keys: a new one rolls the gateways out

    @cached_property
    def groups(self) -> tuple[topology.GroupPlan, ...]:
        """The wanted groups. Raises ``SpecError``."""
        return self._plan(self.spec.replicas)

    @cached_property
    def pattern(self) -> topology.GroupPlan:
        """A group as all are, even when none is wanted. Raises ``SpecError``."""
        return self._plan(1)[0]

    def _plan(self, groups: int) -> tuple[topology.GroupPlan, ...]:
        spec = self.spec
        try:
            return topology.plan(
                topology.ServiceSpec(
                    name=self.name,
                    uid=self.uid,
                    groups=groups,
                    tensor=spec.parallelism.tensor,
                    pipeline=spec.parallelism.pipeline,
                    ranks_per_pod=spec.parallelism.ranks_per_pod,
                    settings=self.settings,
                )
            )
        except topology.TopologyError as error:
            raise SpecError(str(error)) from None

    @property
    def ranks_per_pod(self) -> int:
        parallelism = self.spec.parallelism
        return parallelism.ranks_per_pod or parallelism.tensor * parallelism.pipeline

    @property
    def model_name(self) -> str:
        return self.spec.model.name or self.name

    @cached_property
    def settings(self) -> topology.EngineSettings:
        """What the engine is told."""
        from stopway_operator.render.model import model_path

        spec = self.spec
        deadlines = spec.stop.deadlines
        return topology.EngineSettings(
            model=model_path(spec.model.uri),
            model_name=self.model_name,
            numerics=spec.engine.numerics,
            policy=spec.stop.policy,
            device=spec.engine.device,
            threads=spec.engine.threads or self._threads_of_limit(),
            kv_blocks=spec.engine.kv_blocks,
            max_model_len=spec.model.context_length,
            max_batch_tokens=spec.engine.max_batch_tokens,
            max_running=spec.engine.max_running,
            peer_loss_s=float(spec.engine.peer_loss_seconds),
            step_timeout_s=float(spec.engine.step_timeout_seconds),
            submit_age_s=float(spec.engine.submit_age_seconds),
            drain_s=float(spec.stop.drain_seconds),
            deadline_queue_s=deadlines.queue_seconds or 0.0,
            deadline_first_token_s=deadlines.first_token_seconds or 0.0,
            deadline_total_s=deadlines.total_seconds or 0.0,
            draft_tokens=spec.speculation.draft_tokens,
            grammars=spec.engine.grammars,
            otlp_endpoint=spec.tracing.otlp_endpoint,
        )

    def _threads_of_limit(self) -> int:
        """A CPU limit is invisible to the process, which would start a thread per core."""
        limit = ((self.spec.pod_template.resources or {}).get("limits") or {}).get("cpu")
        cpus = quantity(limit)
        return 0 if not cpus else max(1, int(cpus // self.ranks_per_pod))

    @property
    def grace_s(self) -> int:
        """The pods' grace period: more than the drain."""
        return self.spec.stop.drain_seconds + GRACE_MARGIN_S

    # --- names ---------------------------------------------------------------------------

    @property
    def leaders(self) -> str:
        """The headless Service of the ready leaders."""
        return f"{self.name}-leaders"

    @property
    def gateway(self) -> str:
        return f"{self.name}-gateway"

    @property
    def redis(self) -> str:
        return f"{self.name}-redis"

    @property
    def service_secret(self) -> str:
        return f"{self.name}-secret"

    @property
    def redis_managed(self) -> bool:
        return self.spec.redis.url_secret_ref is None

    def api_keys(self) -> tuple[str, str]:
        """(Secret, key) of the API keys."""
        given = self.spec.gateway.api_keys_secret_ref
        return (given.name, given.key or "keys") if given else (f"{self.name}-api-keys", "keys")

    def redis_url(self, role: str) -> tuple[str, str]:
        """(Secret, key) of the Redis URL that a role uses."""
        given = self.spec.redis.url_secret_ref
        return (given.name, given.key or "url") if given else (self.redis, f"{role}-url")

    def host(self, service: str) -> str:
        """The DNS name of a Service; every pod's search path completes it."""
        return f"{service}.{self.namespace}.svc"

    # --- metadata ------------------------------------------------------------------------

    def selector(self, component: str, group: str = "") -> dict[str, str]:
        """The labels that select the pods of one part."""
        found = {
            objects.LABEL_INSTANCE: self.name,
            objects.LABEL_COMPONENT: component,
        }
        return {**found, objects.LABEL_GROUP: group} if group else found

    def labels(self, component: str, group: str = "") -> dict[str, str]:
        """All labels of one part."""
        return {
            objects.LABEL_NAME: "stopway",
            objects.LABEL_MANAGED: objects.MANAGER,
            objects.LABEL_UID: self.uid,
            **self.selector(component, group),
        }

    def object(self, kind: Kind, name: str, component: str, group: str = "", **body: Any) -> Obj:
        """An object of this service's, owned by it."""
        return {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": self.labels(component, group),
                "ownerReferences": [self.owner()],
            },
            **body,
        }

    def owner(self) -> Obj:
        """Nothing of ours holds up a deletion: it is enough that the owner is gone."""
        return {
            "apiVersion": crd.API_VERSION,
            "kind": crd.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


_SUFFIXES = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def quantity(value: Any) -> float | None:
    """A Kubernetes quantity as a number, or None when it is not one."""
    text = str(value)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            text, factor = text[: -len(suffix)], _SUFFIXES[suffix]
            break
    else:
        factor = 1.0
    try:
        return float(text) * factor
    except ValueError:
        return None
