"""What this machine lacks, in a sentence each. Nothing here changes the machine."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cluster import build, packages, state
from cluster.paths import CACHE, CONTROLLERS, DEBIAN_PYTHON, VENV, make_cache

FREE_GIB_MIN = 12
MEMORY_GIB_MIN = 4
INOTIFY_INSTANCES = 1024

# Host sysctls: kubelet sets the first five, three kubelets and containerds need the last.
SYSCTLS = (
    "vm.overcommit_memory",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
    "fs.inotify.max_user_instances",
)


@cache
def missing() -> tuple[str, ...]:
    """Why the cluster can't be brought up here; empty when it can."""
    if sys.platform != "linux":
        return ("It is Linux only: its nodes are network namespaces and cgroups.",)
    if os.geteuid() != 0:
        return ("It needs root, for network namespaces, mounts and cgroups.",)
    return (*_namespaces(), *_cgroups(), *_sysctls(), *_programs(), *_go(), *_room(), *_other())


def sysctl_file(name: str) -> Path:
    return Path("/proc/sys", *name.split("."))


def _namespaces() -> Iterator[str]:
    probe = (
        "ip link add stopway-a type veth peer name stopway-b && "
        "ip link add stopway-c type bridge && ip link set stopway-a master stopway-c && "
        "mount -t tmpfs tmpfs /mnt"
    )
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        yield "It needs `unshare` (util-linux) and `ip` (iproute2)."
        return
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        yield (
            "It needs namespaces, veth pairs, bridges and mounts (CAP_SYS_ADMIN, CAP_NET_ADMIN; "
            f"in a container: --privileged): {reason[0]}."
        )


def _cgroups() -> Iterator[str]:
    lacking = [c for c in CONTROLLERS if not Path("/sys/fs/cgroup", c, "cgroup.procs").exists()]
    if lacking:
        yield (
            "It needs the cgroup v1 hierarchies at /sys/fs/cgroup (boot with "
            f"systemd.unified_cgroup_hierarchy=0); lacking: {', '.join(lacking)}."
        )
    elif not all(os.access(Path("/sys/fs/cgroup", c), os.W_OK) for c in CONTROLLERS):
        yield "It needs a writable /sys/fs/cgroup."


def _sysctls() -> Iterator[str]:
    for name in SYSCTLS:
        try:
            sysctl_file(name).open("r+").close()
        except OSError as error:
            yield f"It needs to set the sysctl {name} (and restores it): {error.strerror}."


def _programs() -> Iterator[str]:
    lacking = packages.lacking()
    if lacking and shutil.which("apt-get") is None:
        yield f"It needs Debian packages, and there is no apt-get: {' '.join(lacking)}."
    if not DEBIAN_PYTHON.exists() and shutil.which("apt-get") is None:
        yield f"It needs {DEBIAN_PYTHON} (Debian 12's python3), which its pods run too."


def _go() -> Iterator[str]:
    if not build.outdated():
        return
    wanted = build.go_wanted()
    if shutil.which("go") is None:
        yield f"It needs Go {wanted} or newer on PATH: it builds Kubernetes and etcd from modules."
        return
    text = subprocess.run(
        ["go", "env", "GOVERSION"],
        capture_output=True,
        text=True,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    ).stdout
    found = re.search(r"go(\d+(?:\.\d+)*)", text)
    if found is None or _version(found[1]) < _version(wanted):
        yield f"It needs Go {wanted} or newer, and `go` is {text.strip() or 'of no known version'}."


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _room() -> Iterator[str]:
    make_cache()
    free_gib = shutil.disk_usage(CACHE).free / 2**30
    if free_gib < FREE_GIB_MIN and (build.outdated() or not VENV.exists()):
        yield f"It needs {FREE_GIB_MIN} GiB of disk at {CACHE}, and {free_gib:.1f} are free."
    memory = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    if memory is not None and int(memory[1]) / 2**20 < MEMORY_GIB_MIN:
        yield f"It needs {MEMORY_GIB_MIN} GiB of free memory."


def _other() -> Iterator[str]:
    other = state.of_another_checkout()
    if other is not None:
        yield f"Another checkout's cluster is up ({other}): end it there with `ctl down`."
