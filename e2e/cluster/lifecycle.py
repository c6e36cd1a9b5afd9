"""Up and down. Whatever `up` makes is in the state first, and a failed `up` undoes it all."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from cluster import build, control, images, network, nodes, packages, preflight, processes, state
from cluster import venv as environment
from cluster.paths import CLUSTER, CONTROL, LOCK, RUN, STATE, VENV_IN_POD, netns_file
from cluster.shell import ClusterError, lock, run, say, until, waiting
from cluster.state import State


def prepare() -> None:
    """All that `up` needs, made where it is not up to date: cold a quarter of an hour."""
    missing = preflight.missing()
    if missing:
        raise ClusterError(" ".join(missing))
    packages.install()
    build.build()
    images.images()
    environment.venv()


def up(node_count: int = 3, node_grace_s: int = 8, owner: int | None = None) -> None:
    """Brings the cluster up. With an `owner` it goes down once that process is gone."""
    with lock(LOCK):
        _clear_abandoned()
        if state.of_machine() is not None:
            raise ClusterError(f"{STATE} says that a cluster is up: `ctl down` of it first")
        prepare()
        made = State(str(RUN), node_count, node_grace_s, owner)
        with waiting(f"bringing up {node_count} nodes"):
            try:
                _bring_up(made)
            except BaseException:
                say("that failed: taking it down again")
                _keep_logs()
                _down()
                raise
    if owner is not None:
        command = [sys.executable, CLUSTER / "ctl", "watch", str(owner)]
        nothing = subprocess.DEVNULL
        subprocess.run(
            ["setsid", "--fork", *map(str, command)], stdin=nothing, stdout=nothing, stderr=nothing
        )


def down() -> None:
    """Ends all of the cluster. A checkout can end another's that is abandoned."""
    with lock(LOCK):
        if state.of_machine() is not None:
            with waiting("taking the cluster down"):
                _down()


def watch(owner: int) -> None:
    """Returns when the cluster is down; takes it down when its owner has ended without."""
    while (found := state.load()) is not None and found.owner == owner:
        if state.is_abandoned(found):
            down()
        time.sleep(1)


def refresh() -> None:
    """Brings what pods get by hostPath up to date while the cluster runs."""
    environment.venv()


def _down() -> None:
    found = state.of_machine()
    if found is None:
        return
    if not found.is_of_this_checkout and not state.is_abandoned(found):
        raise ClusterError(f"the cluster that is up is another checkout's: {found.folder}")
    processes.end_all(found)
    network.remove(found.names)
    processes.remove_cgroups(found)
    _restore_sysctls(found)
    _check_gone(found)
    shutil.rmtree(found.folder, ignore_errors=not found.is_of_this_checkout)
    shutil.rmtree(STATE.parent)


def is_healthy() -> bool:
    """Whether this checkout's cluster is up and all its nodes are ready."""
    found = state.load()
    return found is not None and found.complete and control.api_is_ready() and _all_ready(found)


def _bring_up(made: State) -> None:
    made.api_port = _free_port()
    made.sysctls = {name: preflight.sysctl_file(name).read_text() for name in preflight.SYSCTLS}
    made.save()
    shutil.rmtree(RUN, ignore_errors=True)  # of a cluster that a reboot has ended
    RUN.mkdir(parents=True)
    made.cgroups = processes.make_cgroups([CONTROL, *made.names])
    made.save()
    instances = preflight.sysctl_file("fs.inotify.max_user_instances")
    if int(instances.read_text()) < preflight.INOTIFY_INSTANCES:
        instances.write_text(str(preflight.INOTIFY_INSTANCES))
    network.lay(made.names)
    control.write_files(made)
    control.start(made)
    for node in made.names:
        nodes.power_on(made, node)
    hint = f"See {RUN}/n*/log/*.log."
    until("all nodes are Ready", lambda: _all_ready(made), 120, hint=hint, every_s=0.3)
    until("the default service account is there", _account_is_there, 60)
    # Policies take effect a moment after they are created.
    until("pods get the virtual environment", _policy_works, 60, every_s=0.3)
    made.complete = True
    made.save()


def _all_ready(made: State) -> bool:
    condition = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
    out = control.kubectl("get", "nodes", "-o", f"jsonpath={condition}", check=False)
    return out.split() == ["True"] * made.nodes


def _account_is_there() -> bool:
    return "default" in control.kubectl("get", "serviceaccount", "default", check=False)


def _policy_works() -> bool:
    dry = ("run", "policy-probe", "--image=localhost/stopway-engine:e2e", "--dry-run=server")
    return VENV_IN_POD in control.kubectl(*dry, "-o", "yaml", check=False)


def _clear_abandoned() -> None:
    found = state.of_machine()
    if found is not None and state.is_abandoned(found):
        say(f"clearing what a cluster that ended badly has left ({found.folder})")
        _down()


def _restore_sysctls(found: State) -> None:
    for name, value in found.sysctls.items():
        preflight.sysctl_file(name).write_text(value)


def _check_gone(found: State) -> None:
    left = [f"the process {pid}" for pid in state.processes(found)]
    names = (CONTROL, *found.names)
    left += [f"the network namespace {netns_file(n)}" for n in names if netns_file(n).exists()]
    left += [f"the cgroup {top}" for top in found.cgroups.values() if Path(top).exists()]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    left += [f"the mount {line.split()[1]}" for line in mounts if f"{found.folder}/" in line]
    if left:
        raise ClusterError(f"`down` left something behind: {', '.join(left)}")


def _keep_logs() -> None:
    """The logs of a failed start outlive it."""
    kept = RUN.with_name("failed-logs")
    shutil.rmtree(kept, ignore_errors=True)
    for folder in (RUN / "log", *RUN.glob("n*/log")):
        if folder.exists():
            run("cp", "-r", "--parents", folder.relative_to(RUN), _made(kept), cwd=RUN)
    say(f"its logs are in {kept}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
