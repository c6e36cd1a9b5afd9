"""Nodes: booting them, and all the ways to lose one."""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster import images, network, processes
from cluster.paths import BIN, CLUSTER, CONTROLLERS, RUN, netns_file, node_ip, pod_cidr
from cluster.shell import in_netns, run, until
from cluster.state import State

_NAMESPACES = ("--cgroup", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")


def power_on(state: State, node: str) -> None:
    """Boots the node, also again after `power_off`: its disk is kept."""
    if is_on(node):
        return
    folder = RUN / node
    (folder / "lib/cni/net.d").mkdir(parents=True, exist_ok=True)
    (folder / "log").mkdir(exist_ok=True)
    if not (folder / "lib/containerd").exists():
        images.clone(folder / "lib/containerd")
    (folder / "lib/cni/net.d/10-e2e.conflist").write_text(_cni(node))
    # Without this cadvisor spends 15 s on the dead pods' cgroups.
    _remove_pod_cgroups(state, node)
    network.forget(node)
    network.plug(node)
    init = ("bash", CLUSTER / "node-init.sh", node, node_ip(node), RUN, BIN, *CONTROLLERS)
    isolated = ("unshare", *_NAMESPACES, "--mount-proc", *init)
    pid_file = folder / "unshare.pid"
    pid_file.unlink(missing_ok=True)
    processes.start(
        state, node, in_netns(netns_file(node), isolated), folder / "log/node.log", pid_file
    )
    until(f"{node} boots", lambda: is_on(node), 15, hint=f"See {folder}/log/node.log.")


def power_off(node: str) -> None:
    """As when the plug is pulled: the cable goes dead first, so nobody sees its sockets close."""
    network.unplug(node)
    kill(node)


def kill(node: str) -> None:
    """Ends all processes of the node at once; its network stays, and closes their sockets."""
    init = _init(node)
    if init is not None:
        os.kill(init, signal.SIGKILL)
        until(f"{node} is off", lambda: not is_on(node), 20)


def freeze(state: State, node: str) -> None:
    """A hung machine: no process runs, the kernel still acknowledges what it is sent."""
    _freezer(state, node).write_text("FROZEN")
    until(f"{node} is frozen", lambda: _freezer(state, node).read_text().strip() == "FROZEN", 20)


def thaw(state: State, node: str) -> None:
    if _freezer(state, node).exists():
        _freezer(state, node).write_text("THAWED")


def kubelet_off(node: str) -> None:
    """The node's pods live on, and nobody reports them."""
    execute(node, ["sh", "-c", "kill -9 $(cat /run/kubelet.pid)"])


def kubelet_on(node: str) -> None:
    execute(node, ["sh", "-c", "kill -0 $(cat /run/kubelet.pid) 2>/dev/null || kill -USR1 1"])


def execute(node: str, command: Sequence[str]) -> str:
    """Runs a command on the node, as root, in its namespaces."""
    return run(*inside(node), *command)


def inside(node: str) -> list[str]:
    init = _init(node)
    if init is None:
        raise RuntimeError(f"{node} is off")
    return ["nsenter", "-t", str(init), "-m", "-n", "-p", "-u", "--"]


def load(state: State, archives: Sequence[Path]) -> None:
    """Imports image archives (docker-archive or OCI) into every node."""
    for archive in archives:
        for node in state.names:
            execute(node, ["ctr", "-n", "k8s.io", "images", "import", str(archive.resolve())])


def is_on(node: str) -> bool:
    return _init(node) is not None


def _init(node: str) -> int | None:
    """The process id of the node's PID 1: the only child of its `unshare`."""
    with suppress(OSError, ValueError, IndexError):
        parent = int((RUN / node / "unshare.pid").read_text())
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
    return None


def _freezer(state: State, node: str) -> Path:
    return state.cgroup("freezer", node) / "freezer.state"


def _remove_pod_cgroups(state: State, node: str) -> None:
    for controller in state.cgroups:
        top = state.cgroup(controller, node)
        for folder in sorted(top.rglob("*"), key=lambda f: len(f.parts), reverse=True):
            if folder.is_dir():
                with suppress(OSError):
                    folder.rmdir()


def _cni(node: str) -> str:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": pod_cidr(node)}]]},
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "e2e", "plugins": [bridge, ports]})
