"""What is checked before a single process is started. Each failure is one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stopway_cli.errors import CliError, Exit
from stopway_cli.stack import config as cfg
from stopway_cli.stack import ports, redis
from stopway_core.topology import GroupPlan, ServiceSpec, TopologyError, plan


@dataclass(frozen=True, slots=True)
class Checked:
    """A stack that may be started: what is left are addresses and processes."""

    groups: tuple[GroupPlan, ...]
    spec: ServiceSpec
    port: int
    keys: tuple[tuple[str, bool, str], ...]  # (tenant, admin, key)


def check(config: cfg.StackConfig) -> Checked:
    """All checks, cheapest first. Raises ``CliError``. Blocks for a few seconds at most."""
    keys = tuple(cfg.key_of(entry) for entry in config.api_keys)
    if config.groups < 1:
        raise CliError(f"{config.groups} groups can serve nobody; use --groups 1", Exit.CONFIG)
    threads = config.settings.threads or _threads(config)
    settings = replace(config.settings, threads=threads, redis_url=config.redis_url)
    spec = config.spec(settings)
    try:
        groups = plan(spec)
    except TopologyError as error:
        raise CliError(str(error), Exit.CONFIG) from None
    _check_blocks(settings.kv_blocks, settings.max_model_len)
    check_model(settings.model)
    if config.port:
        ports.check_free(config.host, config.port)
    if config.redis_url:
        redis.check(config.redis_url)
    else:
        redis.find_server()
    port = config.port or ports.free_ports(1, config.host)[0]
    return Checked(groups, spec, port, keys)


def _threads(config: cfg.StackConfig) -> int:
    """Threads of each rank: all groups of the stack share this machine."""
    from stopway_engine.numerics import Numerics, threads_for

    try:
        numerics = Numerics(config.settings.numerics)
    except ValueError:
        raise CliError(
            f"numerics {config.settings.numerics!r} is none of {', '.join(Numerics)}", Exit.CONFIG
        ) from None
    return threads_for(config.ranks, numerics, cfg.cores())


def check_model(uri: str) -> None:
    """Raise ``CliError`` unless ``uri`` names a model that is here and can be read."""
    from stopway_engine.modelspec import ModelError, resolve_model

    try:
        resolve_model(uri)
    except ModelError as error:
        raise CliError(str(error), Exit.MODEL) from None


def _check_blocks(blocks: int, length: int) -> None:
    from stopway_core.names import BLOCK_SIZE

    needed = -(-length // BLOCK_SIZE)
    if blocks and length and blocks < needed:
        raise CliError(
            f"{blocks} blocks of {BLOCK_SIZE} tokens cannot hold one sequence of {length}, which "
            f"needs {needed}; raise --kv-blocks or lower --max-model-len",
            Exit.CONFIG,
        )


def admin_key(keys: Sequence[tuple[str, bool, str]]) -> str:
    """The key that our own commands use: an admin's, else the first."""
    return next((key for _, admin, key in keys if admin), keys[0][2])
