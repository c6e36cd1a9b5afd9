"""Starting the cluster's processes in its cgroups, and ending all of them by id."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster.paths import CGROUP, CONTROLLERS
from cluster.shell import ClusterError
from cluster.state import State, processes

# Enters the cgroups, says its id, and becomes the command: a process never runs outside them.
_START = """
pid=$1 n=$2; shift 2
while [ "$n" -gt 0 ]; do echo $$ >"$1"; shift; n=$((n - 1)); done
echo $$ >"$pid"
exec "$@"
"""


def start(
    state: State, name: str, command: Sequence[str | Path], log: Path, pid_file: Path
) -> None:
    """Starts a process that outlives this one, in the cgroups of `name` (a node or `cp`)."""
    groups = [state.cgroup(controller, name) / "cgroup.procs" for controller in state.cgroups]
    arguments = (pid_file, len(groups), *groups, *command)
    with log.open("a") as out:
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", _START, "start", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            check=True,
        )


def make_cgroups(names: Sequence[str]) -> dict[str, str]:
    """Below this process's own, so that its limits and its end hold for the cluster too."""
    made: dict[str, str] = {}
    for controller in CONTROLLERS:
        parent = Path("/sys/fs/cgroup", controller, _own(controller).lstrip("/"))
        top = parent / CGROUP
        for folder in (top, *(top / name for name in names)):
            folder.mkdir(exist_ok=True)
            if controller == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((parent / file).read_text())
        made[controller] = str(top)
    return made


def end_all(state: State, bound_s: float = 30) -> None:
    """Kills what is in the cluster's cgroups until nothing is."""
    deadline = time.monotonic() + bound_s
    while True:
        for file in Path(state.cgroups.get("freezer", "/nonexistent")).rglob("freezer.state"):
            with suppress(OSError):
                file.write_text("THAWED")
        alive = processes(state)
        if not alive:
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"these processes do not end: {alive}")
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def remove_cgroups(state: State, bound_s: float = 10) -> None:
    deadline = time.monotonic() + bound_s
    for top in map(Path, state.cgroups.values()):
        while top.exists():
            folders = [top, *(folder for folder in top.rglob("*") if folder.is_dir())]
            for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
                with suppress(OSError):
                    folder.rmdir()
            if top.exists():
                if time.monotonic() > deadline:
                    raise ClusterError(f"the cgroup {top} can't be removed")
                time.sleep(0.1)


def _own(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.removeprefix("name=").split(",") if controllers else ["unified"]
        if controller in names:
            return path
    raise ClusterError(f"this process is in no cgroup of the controller {controller}")
