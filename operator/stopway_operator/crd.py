"""The ``InferenceService``: what a user writes and what the operator answers.

These models are the one source: the CRD's schema and ``docs/crd.md`` are generated from them.

    python -m stopway_operator.crd            the CRD, YAML
    python -m stopway_operator.crd --docs     the reference, Markdown
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from stopway_core.policies import POLICIES
from stopway_core.topology import DRAFT_TOKENS_MAX, GRAMMARS_MAX
from stopway_operator.structural import Schema, structural

GROUP = "serving.stopway.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
NAME_MAX = 40
GROUPS_MAX = 64

URI_PATTERN = (
    r"^(builtin:[a-z0-9][a-z0-9._-]*"
    r"|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
    r"|hostpath:(/[A-Za-z0-9_][A-Za-z0-9._-]*)+)$"
)
DURATION_MAX = 24 * 3600


def _rules(*rules: tuple[str, str]) -> dict[str, Any]:
    """CEL rules as (rule, message)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": text} for rule, text in rules]}


class _Part(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", protected_namespaces=()
    )


# What Kubernetes itself defines is passed through and checked by the API server when it is used.
_Raw = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
_Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
_Seconds = Annotated[float, Field(gt=0, le=DURATION_MAX, allow_inf_nan=False)]


class SecretKey(_Part):
    """One key of a Secret in the service's namespace."""

    name: str = Field(description="Name of the Secret.", min_length=1, max_length=253)
    key: str = Field("", description="Key in it; empty is the usual one.", max_length=253)


class PodTemplate(_Part):
    """What the pods of one part get beyond what the operator gives them.

    In the values of labels and annotations, `{group}` becomes the name of the pod's group and
    `{pods}` the number of pods in it: that is what gang schedulers need to know.
    """

    image: str = Field(
        "", description="Container image; empty is the operator's default.", max_length=512
    )
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = Field(
        "", description="As in a container; empty lets Kubernetes choose."
    )
    image_pull_secrets: list[_Raw] = Field(
        default_factory=list, description="As in a pod.", max_length=16
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Further labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Further annotations.")
    node_selector: dict[str, str] = Field(default_factory=dict, description="As in a pod.")
    tolerations: list[_Raw] = Field(default_factory=list, description="As in a pod.", max_length=64)
    affinity: _Raw | None = Field(
        None, description="As in a pod; it replaces the operator's soft spreading over nodes."
    )
    topology_spread_constraints: list[_Raw] = Field(
        default_factory=list, description="As in a pod.", max_length=16
    )
    scheduler_name: str = Field("", description="As in a pod.", max_length=253)
    priority_class_name: str = Field("", description="As in a pod.", max_length=253)
    runtime_class_name: str = Field("", description="As in a pod.", max_length=253)
    service_account_name: str = Field(
        "", description="As in a pod. No token is mounted in any case.", max_length=253
    )
    resources: _Raw | None = Field(None, description="As in a container: requests and limits.")
    env: list[_Raw] = Field(
        default_factory=list,
        description="As in a container; it cannot replace the operator's own STOPWAY_*.",
        max_length=128,
    )
    volumes: list[_Raw] = Field(default_factory=list, description="As in a pod.", max_length=64)
    volume_mounts: list[_Raw] = Field(
        default_factory=list, description="As in a container.", max_length=64
    )
    security_context: _Raw | None = Field(
        None, description="As in a pod; replaces the default (not root, RuntimeDefault seccomp)."
    )
    container_security_context: _Raw | None = Field(
        None,
        description="As in a container; replaces the default (no capability, no privilege "
        "escalation, root file system read-only).",
    )


class ModelSource(_Part):
    """The model to serve."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "has(self.name) == has(oldSelf.name) && "
                "(!has(self.name) || self.name == oldSelf.name)",
                "model.name is the id that clients use and cannot change: create another "
                "InferenceService for another name",
            )
        )
    )

    uri: str = Field(
        description="Where the model is: `builtin:NAME` (in the image), `pvc://CLAIM/PATH` or "
        "`hostpath:/PATH`; a .gguf file or a Hugging Face folder. A change is rolled out.",
        pattern=URI_PATTERN,
        max_length=512,
    )
    name: str | None = Field(
        None,
        description="The model's id in the API; unset is the service's own name. Immutable: "
        "during a rollout two ids would be served behind one URL.",
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
    )
    context_length: int = Field(
        0, description="Longest sequence in tokens; 0 is the model's own.", ge=0, le=10_000_000
    )


class Parallelism(_Part):
    """How one group (one replica of the model) is spread over ranks and pods."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            (
                "self.ranksPerPod == 0 || (self.tensor * self.pipeline) % self.ranksPerPod == 0",
                "ranksPerPod must divide tensor x pipeline",
            ),
        )
    )

    tensor: int = Field(1, description="Tensor-parallel ranks of a stage.", ge=1, le=64)
    pipeline: int = Field(1, description="Pipeline stages.", ge=1, le=64)
    ranks_per_pod: int = Field(
        0,
        description="Ranks (accelerators) in a pod; 0 puts all ranks of a group in one pod.",
        ge=0,
        le=64,
    )


class Engine(_Part):
    """Settings of the engine; 0 lets it choose."""

    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="`cuda` asks for one GPU per rank of the pod."
    )
    gpu_resource: str = Field(
        "nvidia.com/gpu", description="The resource that is one GPU.", min_length=1, max_length=253
    )
    numerics: Literal["fast", "invariant"] = Field(
        "fast", description="`invariant` makes a request's tokens independent of its neighbours."
    )
    threads: int = Field(
        0,
        description="Threads of a rank; 0 shares the CPU limit, or else the node's cores.",
        ge=0,
        le=1024,
    )
    kv_blocks: int = Field(
        0, description="KV blocks of 16 tokens; 0 is as memory allows.", ge=0, le=100_000_000
    )
    max_batch_tokens: int = Field(0, description="Tokens in one step.", ge=0, le=1_000_000)
    max_running: int = Field(256, description="Sequences that run at once.", ge=1, le=65_536)
    grammars: int = Field(
        32,
        description="Slots for compiled grammars (structured output); equal grammars share one.",
        ge=1,
        le=GRAMMARS_MAX,
    )
    peer_loss_seconds: int = Field(
        10, description="A silent rank is lost after this.", ge=1, le=600
    )
    step_timeout_seconds: int = Field(
        60, description="A step that takes longer ends the epoch.", ge=1, le=3600
    )
    submit_age_seconds: int = Field(
        30, description="A leader refuses an attempt older than this.", ge=1, le=3600
    )
    startup_seconds: int = Field(
        600,
        description="How long a pod may take until its process answers (slow volumes, image "
        "start). Loading the weights has no limit: the pod lives, but is not ready.",
        ge=10,
        le=DURATION_MAX,
    )
    shared_memory: _Quantity = Field("1Gi", description="Size of the memory-backed /dev/shm.")


class Deadlines(_Part):
    """Bounds on every request, in seconds after its arrival at a group."""

    queue_seconds: _Seconds | None = Field(
        None, description="Until it runs: one that waits for longer ends, without a token."
    )
    first_token_seconds: _Seconds | None = Field(
        None, description="Until its first token, the wait in the queue included."
    )
    total_seconds: _Seconds | None = Field(None, description="Until its last token.")


class StopSettings(_Part):
    """How requests stop."""

    policy: Literal[tuple(POLICIES)] = Field(  # type: ignore[valid-type]
        "native",
        description="How stops and preemptions behave. `native` is Stopway's own way. The others "
        "emulate the ways to stop of the engines with these names, on the same model and kernels, "
        "so that they can be compared.",
    )
    drain_seconds: int = Field(
        30,
        description="How long streams may finish when a pod must go; what is left then ends with "
        "reason `drain`. The pods' grace period is longer.",
        ge=0,
        le=3600,
    )
    deadlines: Deadlines = Field(
        default_factory=Deadlines,
        description="Bounds on every request, in seconds after its arrival at a group; unset is "
        "none. One that misses a bound is stopped, and the reason names the bound. A request's own "
        "deadlines can only be tighter.",
    )


class Speculation(_Part):
    """Speculative decoding without a draft model: n-grams, also known as prompt lookup."""

    draft_tokens: int = Field(
        0,
        description="At most so many tokens are guessed ahead for a decoding request, and verified "
        "in one step; 0 is off. The guess is what followed the last time that its latest tokens "
        "stood in its prompt or output. Text that repeats itself (code, quotes, extraction) comes "
        "faster; wrong guesses cost compute, and every token is still the model's own.",
        ge=0,
        le=DRAFT_TOKENS_MAX,
    )


class Redis(_Part):
    """The stop bus. Losing it delays no token and loses no stop."""

    url_secret_ref: SecretKey | None = Field(
        None,
        description="A Redis of yours (7 or later): a Secret with its URL, usual key `url`. "
        "Unset: the operator runs one, without disk, with an ACL user for each role.",
    )
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate, description="For the Redis that the operator runs."
    )


class GatewayService(_Part):
    """The Service of the gateway."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        "ClusterIP", description="As in a Service."
    )
    annotations: dict[str, str] = Field(default_factory=dict, description="Further annotations.")


class Gateway(_Part):
    """The OpenAI-compatible API in front of the groups."""

    replicas: int | None = Field(
        None,
        description="Pods of the gateway. Unset: it starts with one and the number is left to a "
        "HorizontalPodAutoscaler or `kubectl scale` of its Deployment.",
        ge=0,
        le=100,
    )
    api_keys_secret_ref: SecretKey | None = Field(
        None,
        description="Secret with the API keys, usual key `keys`: `[TENANT[:admin]=]KEY`, separated "
        "by `;`, `,` or new lines. Unset: one admin key is generated, see status.apiKeysSecret. "
        "A change rolls the gateways out.",
    )
    trust_traceparent: bool = Field(
        False, description="Continue the client's trace instead of linking to it."
    )
    service: GatewayService = Field(default_factory=GatewayService, description="Its Service.")
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate, description="For the gateway's pods."
    )


class Tracing(_Part):
    """Where spans go."""

    otlp_endpoint: str = Field(
        "",
        description="OTLP over HTTP, for example http://jaeger.tracing:4318; empty is nowhere.",
        pattern=r"^(https?://[^ ]+)?$",
        max_length=512,
    )


class Rollout(_Part):
    """How changes reach running groups. A group is always replaced whole."""

    max_unavailable: int = Field(
        1,
        description="Groups that may be down for a rollout at once; those that are down already "
        "are replaced first.",
        ge=1,
        le=GROUPS_MAX,
    )
    progress_deadline_seconds: int = Field(
        900,
        description="Without progress for this long, Progressing is False and Degraded True. The "
        "rollout goes on when the cause is gone.",
        ge=10,
        le=DURATION_MAX,
    )


class Recovery(_Part):
    """When the operator steps in."""

    lost_node_seconds: int = Field(
        60,
        description="A pod whose node has been NotReady for this long is deleted by force, so that "
        "its group forms elsewhere. The epoch keeps the old pod out.",
        ge=5,
        le=DURATION_MAX,
    )
    incomplete_group_seconds: int = Field(
        300,
        description="When some pods of a group have nodes and others find none for this long, the "
        "youngest such group is released and tried again later. 0: never (gang scheduling).",
        ge=0,
        le=DURATION_MAX,
    )


class InferenceServiceSpec(_Part):
    """What to serve, and how."""

    model: ModelSource
    parallelism: Parallelism = Field(default_factory=Parallelism)
    replicas: int = Field(
        1, description="Groups, each a complete copy of the model.", ge=0, le=GROUPS_MAX
    )
    engine: Engine = Field(default_factory=Engine)
    stop: StopSettings = Field(default_factory=StopSettings)
    speculation: Speculation = Field(default_factory=Speculation)
    redis: Redis = Field(default_factory=Redis)
    gateway: Gateway = Field(default_factory=Gateway)
    tracing: Tracing = Field(default_factory=Tracing)
    rollout: Rollout = Field(default_factory=Rollout)
    recovery: Recovery = Field(default_factory=Recovery)
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate, description="For the pods of the groups."
    )


class Condition(_Part):
    """One condition."""

    type: Literal["Ready", "Progressing", "Degraded"] = Field(description="Its name.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(description="Why, in one word.")
    message: str = Field("", description="Why, and what to do.")
    last_transition_time: str = Field(
        description="When the status changed.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: int = Field(
        description="The generation it is about.", json_schema_extra={"format": "int64"}
    )


class GroupStatus(_Part):
    """One group."""

    name: str = Field(description="Its name, that of its StatefulSet.")
    ready: bool = Field(description="Whether it is in a complete epoch.")
    phase: str = Field(
        description="Ready, Forming, Draining, Released (waits for room), or Absent."
    )
    epoch: int | None = Field(
        None,
        description="Its epoch, as its leader last told it.",
        json_schema_extra={"format": "int64"},
    )
    revision: str = Field("", description="Revision of its pods.")
    nodes: list[str] = Field(default_factory=list, description="Nodes, by the index of the pod.")
    message: str = Field("", description="What keeps it from being ready.")


class InferenceServiceStatus(_Part):
    """What the operator has seen."""

    observed_generation: int = Field(
        0, description="The generation this is about.", json_schema_extra={"format": "int64"}
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        description="Ready: enough groups serve. Progressing: something is being changed. "
        "Degraded: something needs a person.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    replicas: int = Field(0, description="Groups that exist.")
    ready_replicas: int = Field(0, description="Groups in a complete epoch.")
    updated_replicas: int = Field(0, description="Groups of the wanted revision.")
    summary: str = Field("", description="Ready and wanted groups, for people.")
    selector: str = Field("", description="Selects one pod of each group (for the scale).")
    revision: str = Field("", description="The wanted revision.")
    model: str = Field("", description="The model's id in the API.")
    url: str = Field("", description="Where the API is, inside of the cluster.")
    api_keys_secret: str = Field("", description="The Secret that has the API keys.")
    last_progress_time: str | None = Field(
        None,
        description="When a rollout or a start last came forward.",
        json_schema_extra={"format": "date-time"},
    )
    groups: list[GroupStatus] = Field(
        default_factory=list,
        description="The groups.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def _condition(name: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{name}")].{field}'


def root_schema() -> Schema:
    """The schema of the whole object."""
    spec, status = structural(InferenceServiceSpec), structural(InferenceServiceStatus)
    return {
        "description": "A language model served by groups of ranks, behind one gateway.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        **_rules(
            (
                f"self.metadata.name.size() <= {NAME_MAX} && "
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                f"the name must be a DNS label of at most {NAME_MAX} characters that starts with "
                "a letter: Services and pods are named after it",
            )
        ),
    }


def crd() -> Schema:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "inferenceservice",
                "shortNames": ["sinf"],
                "categories": ["all", "stopway"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        _column("Ready", _condition("Ready", "status")),
                        _column("Reason", _condition("Ready", "reason"), priority=1),
                        _column("Groups", ".status.summary"),
                        _column("Model", ".status.model"),
                        _column("URL", ".status.url"),
                        _column("Age", ".metadata.creationTimestamp", "date"),
                    ],
                    "schema": {"openAPIV3Schema": root_schema()},
                }
            ],
        },
    }


def main() -> None:
    """Print the CRD, or its reference."""
    from stopway_operator import documents

    text = documents.reference() if "--docs" in sys.argv[1:] else documents.dump([crd()])
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
