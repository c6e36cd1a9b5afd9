"""Settings of the operator: the environment, prefix ``STOPWAY_OPERATOR_``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

PREFIX = "STOPWAY_OPERATOR_"
IMAGE_TAG = "0.1.0"


@dataclass(frozen=True, slots=True)
class Images:
    """What pods run when their template names no image."""

    engine: str = f"stopway/engine:{IMAGE_TAG}"
    gateway: str = f"stopway/gateway:{IMAGE_TAG}"
    redis: str = "redis:7.4"


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Everything that can be set; seconds end in ``_s``."""

    namespace: str = "stopway-system"  # where the operator runs
    health_port: int = 8081
    resync_s: float = 60.0
    workers: int = 4
    images: Images = Images()


def load_config(environ: Mapping[str, str]) -> OperatorConfig:
    """The settings in ``environ``. Raises ``ValueError`` for one that is no number."""

    def value(name: str, default: str) -> str:
        return environ.get(f"{PREFIX}{name.upper()}") or default

    images = Images()
    chosen = {f.name: value(f"{f.name}_image", getattr(images, f.name)) for f in fields(Images)}
    base = OperatorConfig()
    return OperatorConfig(
        namespace=value("namespace", base.namespace),
        health_port=int(value("health_port", str(base.health_port))),
        resync_s=float(value("resync_s", str(base.resync_s))),
        workers=int(value("workers", str(base.workers))),
        images=Images(**chosen),
    )
