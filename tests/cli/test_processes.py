"""Supervision of real, small child processes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stopway_cli.errors import Exit
from stopway_cli.stack.processes import Backoff, Command, Guard, Supervisor

Script = Callable[[str], tuple[str, ...]]
FAST = Backoff(first_s=0.01, cap_s=0.05, healthy_s=30.0, start_tries=4)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    guard = Guard()
    made = Supervisor(tmp_path, guard, FAST)
    yield made
    await made.stop(list(made.restarts), grace_s=0.0)
    guard.close()


def start(supervisor: Supervisor, argv: tuple[str, ...], name: str = "child") -> None:
    supervisor.start(Command(name, argv, dict(os.environ)))


def test_backoff_doubles_up_to_its_cap() -> None:
    backoff = Backoff(first_s=0.25, cap_s=5.0)
    delays = [backoff.delay_s(deaths) for deaths in (1, 2, 3, 4, 5, 6, 7, 10_000)]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


async def test_what_dies_is_restarted(
    supervisor: Supervisor, script: Script, tmp_path: Path, wait_until: Any
) -> None:
    count = tmp_path / "lives"
    argv = script(f"""
        import pathlib, sys, time
        path = pathlib.Path({str(count)!r})
        lives = len(path.read_text()) if path.exists() else 0
        path.write_text("x" * (lives + 1))
        if lives < 2:
            sys.exit(1)
        time.sleep(1000)
    """)
    start(supervisor, argv)
    await wait_until(lambda: count.exists() and len(count.read_text()) == 3)
    assert supervisor.restarts == {"child": 2}
    assert set(supervisor.pids) == {"child"}
    assert not supervisor.failure.done()


async def test_a_child_that_refuses_its_settings_ends_the_stack_with_its_last_line(
    supervisor: Supervisor, script: Script
) -> None:
    start(supervisor, script("import sys; print('noise'); sys.exit('x')"), "other")
    argv = script("""
        import sys
        print("loading", flush=True)
        print("32 blocks are too few for 4096 tokens; raise --kv-blocks", file=sys.stderr)
        sys.exit(2)
    """)
    start(supervisor, argv)
    problem = await supervisor.failure
    assert problem.code is Exit.CONFIG
    assert problem.message == "32 blocks are too few for 4096 tokens; raise --kv-blocks"
    assert supervisor.restarts["child"] == 0


async def test_what_keeps_dying_at_the_start_is_given_up_with_its_log(
    supervisor: Supervisor, script: Script
) -> None:
    start(supervisor, script("import sys; print('cannot find it'); sys.exit(7)"))
    problem = await supervisor.failure
    assert problem.code is Exit.CHILD
    assert "child ended 4 times" in problem.message
    assert "exit code 7" in problem.message
    assert problem.detail.splitlines() == ["cannot find it"] * 4


async def test_once_ready_a_child_is_restarted_for_ever(
    supervisor: Supervisor, script: Script, wait_until: Any
) -> None:
    supervisor.settled()
    start(supervisor, script("raise SystemExit(1)"))
    await wait_until(lambda: supervisor.restarts["child"] > FAST.start_tries + 1)
    assert not supervisor.failure.done()


async def test_a_command_that_does_not_exist_is_one_sentence(supervisor: Supervisor) -> None:
    with pytest.raises(Exception, match="cannot start child") as caught:
        start(supervisor, ("/no/such/program",))
    assert caught.value.code is Exit.CHILD  # type: ignore[attr-defined]


async def test_stop_takes_the_grandchildren_along(
    supervisor: Supervisor, script: Script, tmp_path: Path, wait_until: Any, is_alive: Any
) -> None:
    pids = tmp_path / "pids"
    argv = script(f"""
        import pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "1000"])
        path = pathlib.Path({str(pids)!r})
        path.with_suffix(".new").write_text(str(child.pid))
        path.with_suffix(".new").rename(path)
        time.sleep(1000)
    """)
    start(supervisor, argv)
    await wait_until(pids.exists)
    everyone = [*supervisor.pids.values(), int(pids.read_text())]
    await supervisor.stop(["child"], grace_s=5.0)
    await wait_until(lambda: not any(map(is_alive, everyone)))
    assert supervisor.pids == {}


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(
    supervisor: Supervisor, script: Script, wait_until: Any, is_alive: Any
) -> None:
    argv = script("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(1000)
    """)
    start(supervisor, argv)
    await wait_until(lambda: "deaf" in supervisor.tail("child"))
    pid = supervisor.pids["child"]
    await supervisor.stop(["child"], grace_s=0.05)
    assert not is_alive(pid)
    assert supervisor.restarts["child"] == 0


async def test_a_stop_does_not_wait_for_a_restart(
    tmp_path: Path, script: Script, wait_until: Any
) -> None:
    guard = Guard()
    supervisor = Supervisor(tmp_path, guard, Backoff(first_s=1000.0, cap_s=1000.0))
    start(supervisor, script("raise SystemExit(1)"))
    await wait_until(lambda: not supervisor.pids)
    await supervisor.stop(["child"], grace_s=1000.0)
    assert supervisor.restarts["child"] == 0
    guard.close()


async def test_the_guard_survives_ctrl_c_and_leaves_with_its_owner(
    tmp_path: Path, is_alive: Any
) -> None:
    guard = Guard()
    guard.remove_at_end(tmp_path / "kept")
    (tmp_path / "kept").write_text("x")
    os.kill(guard.pid, signal.SIGINT)
    assert is_alive(guard.pid)
    guard.close()
    assert not is_alive(guard.pid)
    assert (tmp_path / "kept").exists()  # an orderly end removes its own things
