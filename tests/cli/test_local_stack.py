"""The stack around stand-ins: what each process is told, and that nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stopway_cli.errors import CliError, Exit
from stopway_cli.stack import Commands, LocalStack, Progress, StackConfig, state
from stopway_cli.stack.config import cores
from stopway_core.topology import EngineSettings

Script = Callable[[str], tuple[str, ...]]


def env_of(directory: Path, name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / f"{name}.env.json").read_text())
    return found


async def test_every_process_is_told_where_the_others_are(
    commands: Commands, settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPWAY_URL", "http://elsewhere")
    seen: list[Progress] = []
    config = StackConfig(
        tensor=2,
        groups=2,
        ranks_per_pod=1,
        port=0,
        settings=settings,
        commands=commands,
        engine_env={"STOPWAY_EXTRA": "1"},
    )
    async with LocalStack(config, seen.append) as stack:
        assert set(stack.pids) == {
            "redis",
            "gateway",
            *(f"stopway-g{group}-{pod}" for group in range(2) for pod in range(2)),
        }
        leader, follower = env_of(tmp_path, "stopway-g0-0"), env_of(tmp_path, "stopway-g0-1")
        other, gateway = env_of(tmp_path, "stopway-g1-0"), env_of(tmp_path, "gateway")
        groups = json.loads(Path(gateway["STOPWAY_GROUPS_FILE"]).read_text())
        state_dir = stack.state_dir
        assert redis.Redis.from_url(stack.redis_url).ping()
    for key in ("STOPWAY_CONTROL_PORT", "STOPWAY_FRONT_PORT", "STOPWAY_LEADER_HOST"):
        assert leader[key] == follower[key]
    assert leader["STOPWAY_CONTROL_PORT"] != other["STOPWAY_CONTROL_PORT"]
    assert leader["STOPWAY_HEALTH_PORT"] != follower["STOPWAY_HEALTH_PORT"]
    assert leader["STOPWAY_POD_UID"] != follower["STOPWAY_POD_UID"]
    assert leader["STOPWAY_SECRET"] == other["STOPWAY_SECRET"] == gateway["STOPWAY_SECRET"]
    assert leader["STOPWAY_REDIS_URL"] == gateway["STOPWAY_REDIS_URL"] == stack.redis_url
    assert leader["STOPWAY_SPANS_DIR"] == gateway["STOPWAY_SPANS_DIR"]
    assert int(leader["STOPWAY_THREADS"]) == max(1, cores() // 4)  # of all groups' ranks
    assert "OMP_WAIT_POLICY" not in leader  # the engine's to choose
    assert leader["STOPWAY_EXTRA"] == "1"
    assert "STOPWAY_URL" not in leader
    assert gateway["STOPWAY_API_KEYS"] == f"default:admin={stack.key}"
    assert groups == {
        "groups": [{"name": name, "url": url} for name, url in stack.front_urls.items()]
    }
    assert stack.front_urls["stopway-g0"].endswith(f":{leader['STOPWAY_FRONT_PORT']}")
    assert str(seen[-1]) == "ready ... groups ready 2/2"
    assert not state_dir.exists()


SLOW_GATEWAY = """
import http.server, json, os, pathlib
groups = json.loads(pathlib.Path(os.environ["STOPWAY_GROUPS_FILE"]).read_text())["groups"]
names = [group["name"] for group in groups]
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        pathlib.Path({out!r}).write_text(str(asked))
        self.send_response(503 if asked == 1 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({{"groups": names[:asked - 1]}}).encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["STOPWAY_PORT"])), Handler).serve_forever()
"""


async def test_it_is_ready_when_its_gateway_knows_every_group(
    commands: Commands, settings: EngineSettings, script: Script, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    slow = script(SLOW_GATEWAY.format(out=str(asked)))
    config = StackConfig(
        groups=2, port=0, settings=settings, commands=Commands(commands.supervise, slow)
    )
    async with LocalStack(config):
        assert asked.read_text() == "3"


async def test_leaving_ends_every_process(
    commands: Commands, settings: EngineSettings, is_alive: Any
) -> None:
    config = StackConfig(port=0, settings=settings, commands=commands)
    async with LocalStack(config) as stack:
        pids = list(stack.pids.values())
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


async def test_a_killed_process_comes_back(
    commands: Commands, settings: EngineSettings, wait_until: Any
) -> None:
    config = StackConfig(port=0, settings=settings, commands=commands)
    async with LocalStack(config) as stack:
        for name in ("redis", "gateway", "stopway-g0-0"):
            before = stack.pids[name]
            os.kill(before, signal.SIGKILL)
            await wait_until(lambda n=name, b=before: stack.pids.get(n, b) != b)
        assert set(stack.restarts.values()) == {1}
        client = redis.Redis.from_url(stack.redis_url)
        await wait_until(lambda: _answers(client))


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


async def test_the_embedded_redis_lets_nobody_in_without_the_password(
    commands: Commands, settings: EngineSettings
) -> None:
    config = StackConfig(port=0, settings=settings, commands=commands)
    async with LocalStack(config) as stack:
        port = urlsplit(stack.redis_url).port
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=int(port or 0), retry=Retry(NoBackoff(), 0)).ping()
        with redis.Redis.from_url(stack.redis_url) as client:
            assert client.config_get("save") == {"save": ""}
        secret = urlsplit(stack.redis_url).password or ""
        assert len(secret) > 20
        arguments = Path(f"/proc/{stack.pids['redis']}/cmdline").read_bytes()
        assert secret.encode() not in arguments


async def test_a_given_redis_is_used_and_left_alone(
    commands: Commands, settings: EngineSettings, tmp_path: Path
) -> None:
    own = StackConfig(port=0, settings=settings, commands=commands)
    async with LocalStack(own) as first:
        config = StackConfig(
            port=0, settings=settings, commands=commands, redis_url=first.redis_url
        )
        async with LocalStack(config) as second:
            assert "redis" not in second.pids
            assert env_of(tmp_path, "gateway")["STOPWAY_REDIS_URL"] == first.redis_url
        with redis.Redis.from_url(first.redis_url) as client:
            assert client.ping()


async def test_a_start_that_fails_leaves_nothing(
    commands: Commands, settings: EngineSettings, script: Script
) -> None:
    refuses = script("import sys; sys.stderr.write('too few blocks: 3, needed 9'); sys.exit(2)")
    config = StackConfig(port=0, settings=settings, commands=Commands(refuses, commands.gateway))
    stack = LocalStack(config)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(CliError, match="too few blocks: 3, needed 9") as caught:
        async with stack:
            pytest.fail("it cannot be ready")
    assert caught.value.code is Exit.CONFIG
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not stack.state_dir.exists()


def _pids(stack: LocalStack) -> list[int]:
    try:
        return list(stack.pids.values())
    except RuntimeError:
        return []


async def test_a_cancelled_start_leaves_nothing(
    commands: Commands, settings: EngineSettings, script: Script, wait_until: Any, is_alive: Any
) -> None:
    never = script("import time; time.sleep(1000)")
    stack = LocalStack(
        StackConfig(port=0, settings=settings, commands=Commands(never, commands.gateway))
    )
    entering = asyncio.create_task(stack.__aenter__())
    await wait_until(lambda: len(_pids(stack)) == 3)
    pids = _pids(stack)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not any(map(is_alive, pids))


async def test_a_start_that_takes_too_long_shows_the_logs(
    commands: Commands, settings: EngineSettings, script: Script
) -> None:
    never = script("import time; print('still loading', flush=True); time.sleep(1000)")
    config = StackConfig(
        port=0,
        settings=settings,
        commands=Commands(never, commands.gateway),
        start_timeout_s=0.0,
    )

    def until_it_has_logged(now: Progress) -> None:
        end = time.monotonic() + 30.0
        while "loading" in now.what and "still loading" not in stack.log_tail("stopway-g0-0"):
            assert time.monotonic() < end

    stack = LocalStack(config, until_it_has_logged)
    with pytest.raises(CliError, match="0 of 1 groups are") as caught:
        async with stack:
            pytest.fail("it cannot be ready")
    assert "still loading" in caught.value.detail


async def test_a_state_dir_is_kept_and_used_once(
    commands: Commands, settings: EngineSettings, tmp_path: Path
) -> None:
    kept = tmp_path / "state"
    config = StackConfig(port=0, settings=settings, commands=commands, state_dir=kept)
    async with LocalStack(config):
        with pytest.raises(CliError, match="used by another running stack"):
            async with LocalStack(config):
                pytest.fail("two stacks share a directory")
    assert (kept / "logs" / "gateway.log").exists()


async def test_a_registered_stack_is_found_while_it_runs(
    commands: Commands,
    settings: EngineSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    config = StackConfig(port=0, settings=settings, commands=commands, register=True)
    assert state.running() is None
    async with LocalStack(config) as stack:
        found = state.running()
        assert found is not None
        assert (found.url, found.key) == (stack.url, stack.key)
        file = next(state.directory().glob("*.json"))
        assert file.stat().st_mode & 0o777 == 0o600
    assert state.running() is None
    assert not state.directory().exists()


OWNER = """
import asyncio, sys
from stopway_cli import up
from stopway_cli.stack import Commands, StackConfig, preflight
from stopway_core.topology import EngineSettings
preflight.check_model = lambda uri: None
argv = tuple(sys.argv[1:])
config = StackConfig(port=0, settings=EngineSettings(drain_s=0.0), register=True,
                     commands=Commands(argv, argv))
sys.exit(asyncio.run(up.serve(config)))
"""


@pytest.fixture
def owner(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``stopway up`` around stand-ins, as a process of its own, once it is ready."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *commands.supervise],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)]
)
async def test_however_up_ends_nothing_is_left(
    owner: subprocess.Popen[str],
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    wait_until: Any,
    is_alive: Any,
) -> None:
    assert owner.stdout is not None
    line = await asyncio.to_thread(owner.stdout.readline)
    assert line.startswith("ready: http://127.0.0.1:")
    assert "  key sk-stopway-" in line
    await wait_until(lambda: state.running() is not None)
    family = [child.pid for child in psutil.Process(owner.pid).children(recursive=True)]
    assert len(family) == 4  # guard, redis, pod, gateway
    owner.send_signal(number)
    assert await asyncio.to_thread(owner.wait, 60) == code
    await wait_until(lambda: not any(map(is_alive, family)))
    await wait_until(lambda: not list((tmp_path / "tmp").iterdir()))
    assert state.running() is None
