"""The Debian packages of the cluster; what is missing is installed."""

import subprocess
from collections.abc import Sequence

from cluster.shell import environment, run, waiting

PACKAGES = (
    "containerd",
    "runc",
    "containernetworking-plugins",
    "iptables",
    "nftables",
    "conntrack",
    "ethtool",
    "socat",
    "mmdebstrap",
    "iproute2",
    "procps",
    "openssl",
    "gcc",
    "libc6-dev",
    "python3",
    "python3-venv",
)


def lacking(names: Sequence[str] = PACKAGES) -> list[str]:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names],
        capture_output=True,
        text=True,
    )
    there = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in names if name not in there]


def install(names: Sequence[str] = PACKAGES) -> None:
    names = lacking(names)
    if not names:
        return
    with waiting(f"installing Debian packages: {' '.join(names)}"):
        env = environment(DEBIAN_FRONTEND="noninteractive")
        run("apt-get", "-qq", "update", env=env)
        run("apt-get", "-qq", "install", "-y", "--no-install-recommends", *names, env=env)
