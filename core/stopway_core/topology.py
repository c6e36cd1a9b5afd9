"""What a service consists of: one pure function from its spec to groups, pods and environments.

The operator renders the result to StatefulSets, ``stopway up`` to local processes, so the two
cannot come to differ. Only addresses are filled in by the renderer (``Addresses``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

CONTROL_PORT = 7310
FRONT_PORT = 7311
HEALTH_PORT = 7312
GATEWAY_PORT = 8080

DRAFT_TOKENS_MAX = 8
GRAMMARS_MAX = 1024


class TopologyError(ValueError):
    """A spec that describes no service; the message says what to change."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What every pod of every group is told alike. Units are in the names; ``0`` means "choose".

    For deadlines and drafts ``0`` means "none".
    """

    model: str = "builtin:smollm2"
    model_name: str = "smollm2-135m-instruct"
    numerics: str = "fast"
    policy: str = "native"
    device: str = "auto"
    threads: int = 0
    kv_blocks: int = 0
    max_model_len: int = 0
    max_batch_tokens: int = 0
    max_running: int = 256
    peer_loss_s: float = 10.0
    step_timeout_s: float = 60.0
    submit_age_s: float = 30.0
    drain_s: float = 30.0
    deadline_queue_s: float = 0.0
    deadline_first_token_s: float = 0.0
    deadline_total_s: float = 0.0
    draft_tokens: int = 0
    grammars: int = 32
    redis_url: str = ""
    otlp_endpoint: str = ""
    spans_dir: str = ""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """An InferenceService as far as the engine's shape goes."""

    name: str = "stopway"
    uid: str = "local"
    groups: int = 1
    tensor: int = 1
    pipeline: int = 1
    ranks_per_pod: int = 0  # 0: all ranks of a group in one pod
    settings: EngineSettings = field(default_factory=EngineSettings)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where one pod listens and finds its leader; ports are of the pod's own address."""

    leader_host: str
    bind_host: str
    control_port: int = CONTROL_PORT
    front_port: int = FRONT_PORT
    health_port: int = HEALTH_PORT
    node: str = ""
    pod_name: str = ""
    pod_uid: str = ""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod: ``ranks`` are global ranks of its group; pod 0 has the leader, rank 0."""

    group: str
    index: int
    ranks: tuple[int, ...]
    base_env: Mapping[str, str]

    @property
    def leader(self) -> bool:
        return self.index == 0

    def env(self, addresses: Addresses) -> dict[str, str]:
        """The complete environment of this pod's ``supervise``, secrets aside."""
        return {
            **self.base_env,
            "STOPWAY_LEADER_HOST": addresses.leader_host,
            "STOPWAY_BIND_HOST": addresses.bind_host,
            "STOPWAY_CONTROL_PORT": str(addresses.control_port),
            "STOPWAY_FRONT_PORT": str(addresses.front_port),
            "STOPWAY_HEALTH_PORT": str(addresses.health_port),
            "STOPWAY_NODE": addresses.node,
            "STOPWAY_POD_NAME": addresses.pod_name,
            "STOPWAY_POD_UID": addresses.pod_uid,
        }


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The pods of one replica."""

    name: str
    pods: tuple[PodPlan, ...]


def plan(spec: ServiceSpec) -> tuple[GroupPlan, ...]:
    """The groups of ``spec``. Raises ``TopologyError`` for a spec that fits no pods."""
    for what, value in (("tensor", spec.tensor), ("pipeline", spec.pipeline)):
        if value < 1:
            raise TopologyError(f"{what} parallelism is {value}; it must be at least 1")
    if spec.groups < 0:
        raise TopologyError(f"{spec.groups} groups asked for; it must be 0 or more")
    world = spec.tensor * spec.pipeline
    per_pod = spec.ranks_per_pod or world
    if per_pod < 1 or world % per_pod:
        raise TopologyError(
            f"{per_pod} ranks per pod do not divide tensor {spec.tensor} x pipeline "
            f"{spec.pipeline} = {world} ranks; choose a divisor of {world}"
        )
    return tuple(_group(spec, f"{spec.name}-g{index}", per_pod) for index in range(spec.groups))


def _group(spec: ServiceSpec, name: str, per_pod: int) -> GroupPlan:
    world = spec.tensor * spec.pipeline
    pods = []
    for index in range(world // per_pod):
        ranks = tuple(range(index * per_pod, (index + 1) * per_pod))
        pods.append(PodPlan(name, index, ranks, _base_env(spec, name, index, per_pod)))
    return GroupPlan(name, tuple(pods))


def _base_env(spec: ServiceSpec, group: str, pod_index: int, per_pod: int) -> dict[str, str]:
    env = {
        "STOPWAY_SERVICE": spec.name,
        "STOPWAY_SERVICE_UID": spec.uid,
        "STOPWAY_GROUP": group,
        "STOPWAY_POD_INDEX": str(pod_index),
        "STOPWAY_TENSOR": str(spec.tensor),
        "STOPWAY_PIPELINE": str(spec.pipeline),
        "STOPWAY_RANKS_PER_POD": str(per_pod),
    }
    render: Callable[[object], str] = str
    for key in EngineSettings.__dataclass_fields__:
        env[f"STOPWAY_{key.upper()}"] = render(getattr(spec.settings, key))
    return env


def stage_of(rank: int, tensor: int) -> int:
    """The pipeline stage of a rank: ranks of one stage are consecutive."""
    return rank // tensor
