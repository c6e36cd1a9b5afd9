"""What a local stack consists of, and what each of its processes is told."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stopway_cli.errors import CliError, Exit
from stopway_core import names
from stopway_core.topology import EngineSettings, ServiceSpec

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Commands:
    """The command lines of the processes; tests put stand-ins here."""

    supervise: tuple[str, ...] = (sys.executable, "-m", "stopway_engine.supervise")
    gateway: tuple[str, ...] = (sys.executable, "-m", "stopway_gateway")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """A local stack. ``settings`` is what the engine is told; 0 in it means "choose".

    ``port`` 0 takes any free port. Without ``redis_url`` a Redis is started, without
    ``api_keys`` a key is generated, without ``state_dir`` a temporary one is used and removed.
    """

    tensor: int = 1
    pipeline: int = 1
    groups: int = 1
    ranks_per_pod: int = 0
    host: str = LOOPBACK
    port: int = 8080
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(drain_s=5.0))
    api_keys: tuple[str, ...] = ()
    redis_url: str = ""
    state_dir: Path | None = None
    register: bool = False  # let `stopway cancel | top | trace` find it
    commands: Commands = field(default_factory=Commands)
    engine_env: Mapping[str, str] = field(default_factory=dict)
    gateway_env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0

    def spec(self, settings: EngineSettings) -> ServiceSpec:
        """The service that this stack is, with ``settings`` filled in."""
        return ServiceSpec(
            name="stopway",
            uid="local",
            groups=self.groups,
            tensor=self.tensor,
            pipeline=self.pipeline,
            ranks_per_pod=self.ranks_per_pod,
            settings=settings,
        )

    @property
    def ranks(self) -> int:
        return self.groups * self.tensor * self.pipeline


def key_of(entry: str) -> tuple[str, bool, str]:
    """(tenant, admin, key) of an ``--api-key`` value, ``[TENANT[:admin]=]KEY``.

    Raises ``CliError`` for one that is neither.
    """
    owner, separator, key = entry.partition("=")
    if not separator or not key.strip("="):  # a bare key may end with base64's padding
        owner, key = "default:admin", entry
    tenant, colon, role = owner.partition(":")
    if not key or any(c in ";," or c.isspace() for c in entry):
        raise CliError(
            "an API key is empty or has a space, comma or semicolon in it; choose another for "
            "--api-key",
            Exit.CONFIG,
        )
    if not names.valid_id(tenant) or (colon and role != "admin"):
        raise CliError(
            f"{owner!r} is no tenant; write --api-key TENANT=KEY or TENANT:admin=KEY", Exit.CONFIG
        )
    return tenant, role == "admin", key


def cores() -> int:
    """The cores this process may use: its affinity, bounded by the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limit = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return allowed
    return max(1, min(allowed, limit))


def inherited_env(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process of the stack inherits: all but settings of Stopway's own.

    ``PYTHONSAFEPATH`` keeps files of the current directory from shadowing modules.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("STOPWAY_")}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
