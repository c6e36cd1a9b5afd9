"""What a pod is told, from its environment (``STOPWAY_*``), checked before anything starts."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from stopway_core import names
from stopway_core.policies import POLICIES
from stopway_core.topology import (
    CONTROL_PORT,
    DRAFT_TOKENS_MAX,
    FRONT_PORT,
    GRAMMARS_MAX,
    HEALTH_PORT,
)
from stopway_core.types import Deadlines


class ConfigError(Exception):
    """A setting that cannot work; the message is one sentence that says what to change."""


EXIT_CONFIG = 2  # a restart would not help: the message on stderr says what to change
EXIT_EPOCH_ENDED = 75  # a peer was lost; start again and meet the others in a new epoch


class PodConfig(BaseSettings):
    """The settings of one pod. ``0`` and empty mean "choose"; units are in the names.

    For deadlines and drafts ``0`` means "none". ``grammars`` is how many compiled ones are kept.
    """

    model_config = SettingsConfigDict(
        env_prefix="STOPWAY_", extra="ignore", protected_namespaces=()
    )

    service: str = "stopway"
    service_uid: str = "local"
    group: str = "stopway-g0"
    pod_index: int = Field(0, ge=0)
    pod_name: str = ""
    pod_uid: str = ""
    node: str = ""
    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    ranks_per_pod: int = Field(1, ge=1)
    leader_host: str = "127.0.0.1"
    bind_host: str = "127.0.0.1"
    control_port: int = Field(CONTROL_PORT, ge=1, le=65535)
    front_port: int = Field(FRONT_PORT, ge=1, le=65535)
    health_port: int = Field(HEALTH_PORT, ge=1, le=65535)
    secret: str = Field(min_length=16)

    model: str = "builtin:smollm2"
    model_name: str = "smollm2-135m-instruct"
    numerics: Literal["fast", "invariant"] = "fast"
    policy: str = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(0, ge=0)
    block_size: int = Field(names.BLOCK_SIZE, ge=1)
    kv_blocks: int = Field(0, ge=0)
    max_model_len: int = Field(0, ge=0)
    max_batch_tokens: int = Field(0, ge=0)
    max_running: int = Field(256, ge=1)
    peer_loss_s: float = Field(10.0, gt=0)
    step_timeout_s: float = Field(60.0, gt=0)
    submit_age_s: float = Field(30.0, gt=0)
    drain_s: float = Field(30.0, ge=0)
    deadline_queue_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    deadline_first_token_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    deadline_total_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    draft_tokens: int = Field(0, ge=0, le=DRAFT_TOKENS_MAX)
    grammars: int = Field(32, ge=1, le=GRAMMARS_MAX)
    redis_url: str = ""
    otlp_endpoint: str = ""
    spans_dir: str = ""

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> range:
        """The ranks of this pod."""
        first = self.pod_index * self.ranks_per_pod
        return range(first, first + self.ranks_per_pod)

    @property
    def leader(self) -> bool:
        """Whether this pod has rank 0, and so the front."""
        return self.pod_index == 0

    @property
    def deadlines(self) -> Deadlines:
        """The service's own: a request's can only be tighter."""
        return Deadlines(
            queue=self.deadline_queue_s or None,
            first_token=self.deadline_first_token_s or None,
            total=self.deadline_total_s or None,
        )

    def fingerprint(self, weights: str, build: str) -> str:
        """What all ranks of a group must have alike to be one group (hex).

        Deadlines and drafts are not in it: only the leader decides by them, and the others find
        what it decided in its turns.
        """
        alike = {
            "build": build,
            "weights": weights,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "numerics": self.numerics,
            "block_size": self.block_size,
            "policy": self.policy,
            "grammars": self.grammars,
        }
        return hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:32]


def load_config() -> PodConfig:
    """The settings in the environment. Raises ``ConfigError`` for one that cannot work."""
    try:
        config = PodConfig()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise ConfigError(f"STOPWAY_{name}: {first['msg']}") from None
    if config.policy not in POLICIES:
        raise ConfigError(
            f"policy {config.policy!r} is not built in; choose one of: {', '.join(POLICIES)}"
        )
    if config.world % config.ranks_per_pod:
        raise ConfigError(
            f"{config.ranks_per_pod} ranks per pod do not divide tensor x pipeline = {config.world}"
        )
    if config.pod_index * config.ranks_per_pod >= config.world:
        raise ConfigError(f"pod {config.pod_index} is outside of a group of {config.world} ranks")
    return config
