"""Where everything is, and the fixed addresses of the cluster.

The cluster lives in network namespaces that have no way out of the machine:

    stopway-cp       control plane, CoreDNS and the bridge br0 = 10.89.0.1; test clients run here
    stopway-n1..nN   one per node: eth0 = 10.89.0.1N, pods 10.244.N.0/24
"""

import os
import re
from pathlib import Path

CLUSTER = Path(__file__).resolve().parent
ROOT = CLUSTER.parents[1]
CACHE = Path(os.environ.get("STOPWAY_E2E_CACHE") or CLUSTER / "cache").resolve()
TOOLS = CLUSTER / "tools"
BIN = CACHE / "bin"
IMAGES = CACHE / "images"
STORE = IMAGES / "store"
VENV = CACHE / "venv"
RUN = CACHE / "run"
PKI = RUN / "pki"
LOGS = RUN / "log"

# One cluster a machine: the namespaces' names are the machine's. This says which is up and what
# it has made, and outlives the checkout that brought it up.
MACHINE = Path("/run/stopway-e2e")
STATE = MACHINE / "state.json"
LOCK = Path("/run/stopway-e2e.lock")

# Where a pod finds the virtual environment, whatever path it has on the machine.
VENV_IN_POD = "/opt/stopway/venv"

DEBIAN_PYTHON = Path("/usr/bin/python3.11")

API_IP = "10.89.0.1"
API_PORT = 6443
LINK_PREFIX = 24
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
POD_CIDR = "10.244.0.0/16"
CONTROL = "cp"
CGROUP = "stopway-e2e"
CONTROLLERS = (
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "systemd",
    "unified",
)


def netns(name: str) -> str:
    """The network namespace of a node (`n1`) or of the control plane (`cp`)."""
    return f"stopway-{name}"


def netns_file(name: str) -> Path:
    return Path("/run/netns") / netns(name)


def number(node: str) -> int:
    """1 of `n1`."""
    match = re.fullmatch(r"n([1-9][0-9]?)", node)
    if match is None:
        raise ValueError(f"{node!r} is no node: they are called n1, n2, ...")
    return int(match[1])


def node_ip(node: str) -> str:
    return f"10.89.0.{10 + number(node)}"


def pod_cidr(node: str) -> str:
    return f"10.244.{number(node)}.0/24"


def make_cache() -> None:
    """The folder of all that is made, which git and the linters pass over."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
