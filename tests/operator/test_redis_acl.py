"""The users of the managed Redis, on a real Redis 7: each may do its part and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

from stopway_cli.stack import ports
from stopway_core import names
from stopway_operator.render.redis import users

UID = "uid-1"
STOPS = names.stops_stream(UID, "chat-g0")
GATEWAYS = names.gateway_stops_stream(UID)
RECEIPTS = names.receipts_stream(UID)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    server = os.environ.get("STOPWAY_REDIS_SERVER") or shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server here (PATH, STOPWAY_REDIS_SERVER)")
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"v=(\d+)", said.stdout)
    if version is None or int(version[1]) < 7:
        pytest.skip("redis-server is older than 7, whose ACLs tell reading from writing")
    acl = tmp_path / "users.acl"
    acl.write_text(users(UID, "gateway-password", "engine-password"))
    found = ports.free_ports(1, "127.0.0.1")[0]
    flags = ["--port", str(found), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command = [server, *flags, "--dir", str(tmp_path), "--aclfile", str(acl)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 30
            while not _listens(found):
                assert process.poll() is None and time.monotonic() < end, "it does not start"
                time.sleep(0.05)
            yield found
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def client(port: int, role: str) -> redis.Redis:
    return redis.Redis.from_url(f"redis://{role}:{role}-password@127.0.0.1:{port}/0")


def test_each_role_may_do_its_part(port: int) -> None:
    with client(port, "gateway") as gateway, client(port, "engine") as engine:
        assert gateway.ping() and engine.ping()
        gateway.xadd(STOPS, {"stop": "{}"}, minid="0", approximate=True)
        gateway.xadd(GATEWAYS, {"stop": "{}"})
        assert engine.xrevrange(STOPS, count=1) and engine.xread({STOPS: "0"})
        engine.xadd(RECEIPTS, {"receipt": "{}"})
        engine.xtrim(RECEIPTS, minid="0", approximate=True)
        assert gateway.xread({RECEIPTS: "0", GATEWAYS: "0"})


def test_and_nothing_else(port: int) -> None:
    with client(port, "gateway") as gateway, client(port, "engine") as engine:
        for attempt in (
            lambda: engine.xadd(STOPS, {"stop": "{}"}),
            lambda: engine.xread({names.stops_stream("other", "g"): "0"}),
            lambda: engine.keys("*"),
            lambda: gateway.xread({STOPS: "0"}),
            lambda: gateway.flushall(),
            lambda: gateway.config_get("*"),
        ):
            with pytest.raises(NoPermissionError):
                attempt()
    with (
        redis.Redis.from_url(f"redis://127.0.0.1:{port}/0") as nobody,
        pytest.raises(redis.AuthenticationError),
    ):
        nobody.ping()
