"""Wrong input is one sentence that says what to do, a code of its own, and nothing started."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from stopway_cli.errors import CliError, Exit
from stopway_cli.main import app
from stopway_cli.stack import StackConfig, ports, preflight
from stopway_cli.stack import config as cfg
from stopway_core.topology import EngineSettings


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, the sentence) of ``stopway ARGUMENTS``; progress lines left out."""
    before = set(psutil.Process().children(recursive=True))
    result = CliRunner().invoke(app, list(arguments))
    lines = [line for line in result.stderr.splitlines() if line.startswith("stopway: ")]
    assert set(psutil.Process().children(recursive=True)) <= before
    return result.exit_code, "\n".join(lines)


def test_a_missing_model(tmp_path: Path) -> None:
    code, line = run("up", "--model", str(tmp_path / "no.gguf"), "--port", "0")
    assert code == Exit.MODEL
    assert "There is no model at" in line and "no.gguf" in line
    assert len(line.splitlines()) == 1


def test_a_port_in_use(taken_port: int) -> None:
    code, line = run("up", "--port", str(taken_port))
    assert code == Exit.PORT
    assert line == (
        f"stopway: port {taken_port} on 127.0.0.1 is in use; stop what listens there, or choose "
        "another with --port (0 takes any free one)"
    )


def test_a_redis_that_does_not_answer(taken_port: int) -> None:
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        code, line = run("up", "--port", "0", "--redis-url", f"redis://:hush@127.0.0.1:{port}/0")
    assert code == Exit.REDIS
    assert f"Redis at 127.0.0.1:{port} does not answer" in line
    assert "hush" not in line


def test_an_address_that_is_no_redis_url() -> None:
    code, line = run("up", "--port", "0", "--redis-url", "http://127.0.0.1")
    assert code == Exit.REDIS
    assert "redis://[USER:PASSWORD@]HOST:PORT/DB" in line


def test_a_foreign_word_for_numerics() -> None:
    with pytest.raises(CliError, match="'odd' is none of"):
        preflight.check(StackConfig(settings=EngineSettings(numerics="odd")))


def test_ranks_that_do_not_fit_pods() -> None:
    code, line = run("up", "--port", "0", "--tensor", "2", "--ranks-per-pod", "3")
    assert code == Exit.CONFIG
    assert "choose a divisor of 2" in line


def test_too_few_blocks_names_both_numbers() -> None:
    code, line = run("up", "--port", "0", "--kv-blocks", "10", "--max-model-len", "4096")
    assert code == Exit.CONFIG
    assert "10 blocks" in line and "needs 256" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "--tensor", "0"),
        ("up", "--port", "70000"),
        ("up", "--numerics", "sloppy"),
        ("up", "--policy", "nobody"),
        ("up", "--deadline-queue", "-1"),
        ("up", "--deadline-first-token", "nan"),
        ("up", "--deadline-total", "inf"),
        ("up", "--draft-tokens", "9"),
        ("up", "--grammars", "0"),
        ("pause",),
        ("pause", "--mode", "softly"),
        ("cancel",),
        ("cancel", "x", "--until", "tomorrow"),
        ("cancel", "x", "--all"),
        ("cancel", "--conversation", "c", "--tenant", "t"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == Exit.USAGE


@pytest.mark.parametrize(
    "command", ["cancel x", "top --once", "trace x", "groups", "resume", "bench"]
)
def test_no_server_there(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code, line = run(*command.split())
    assert code == (Exit.USAGE if command == "bench" else Exit.SERVER)
    assert len(line.splitlines()) == 1


def test_a_server_that_does_not_answer() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for command in (["cancel", "x", "--url", url], ["top", "--url", url], ["bench", url]):
            code, line = run(*command)
            assert code == Exit.SERVER
            assert f"{url} does not answer" in line


def test_every_exit_code_is_distinct() -> None:
    assert len({int(code) for code in Exit}) == len(list(Exit))


def test_ports_are_free_distinct_and_below_the_kernels_own() -> None:
    found = ports.free_ports(20, "127.0.0.1")
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(found)) == 20
    assert all(1024 <= port < max(low, 32_768) for port in found)


def test_no_port_is_given_twice_until_all_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process listens on its port seconds after it was given one."""
    monkeypatch.setattr(ports, "_given", {})
    monkeypatch.setattr(ports, "_SPAN", 40)
    monkeypatch.setattr(ports, "_probe", lambda host, port: None)
    low = ports._ephemeral_low()
    ports.check_free("127.0.0.1", low - 1)  # a gateway's, say
    found = [port for _ in range(13) for port in ports.free_ports(3, "127.0.0.1")]
    assert sorted([*found, low - 1]) == list(range(low - 40, low))
    again = ports.free_ports(40, "127.0.0.1")
    assert again == [low - 1, *found], "those first that were given first"
    with pytest.raises(CliError, match="only 40 of 41 ports are free"):
        ports.free_ports(41, "127.0.0.1")
    assert len(ports._given) == 40


def test_an_address_of_another_machine_is_said_so() -> None:
    with pytest.raises(CliError, match=r"no address of this machine|cannot listen on"):
        ports.check_free("203.0.113.7", 8080)


@pytest.mark.parametrize(
    ("entry", "meaning"),
    [
        ("abc", ("default", True, "abc")),
        ("abc==", ("default", True, "abc==")),
        ("acme=abc", ("acme", False, "abc")),
        ("acme:admin=a=b", ("acme", True, "a=b")),
    ],
)
def test_api_keys(entry: str, meaning: tuple[str, bool, str]) -> None:
    assert cfg.key_of(entry) == meaning


@pytest.mark.parametrize("entry", ["", "a b", "a,b", "a;b", "acme:root=key", "=key", "a/b=key"])
def test_keys_that_cannot_be(entry: str) -> None:
    with pytest.raises(CliError):
        cfg.key_of(entry)


def test_the_command_line_starts_without_the_heavy_parts() -> None:
    heavy = {"torch", "numpy", "httpx", "redis", "asyncio", "opentelemetry"}
    code = "import sys, stopway_cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


def test_the_stack_needs_no_torch() -> None:
    code = "import sys, stopway_cli.demo, stopway_cli.stack; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
