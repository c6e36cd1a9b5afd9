"""The command line of `ctl`."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster import (
    build,
    containerfiles,
    images,
    lifecycle,
    network,
    nodes,
    packages,
    preflight,
    state,
)
from cluster import venv as environment
from cluster.paths import BIN, CONTROL, RUN, make_cache, netns_file
from cluster.shell import ClusterError, in_netns
from cluster.state import State

NODE_ACTIONS = (
    "on",
    "off",
    "kill",
    "freeze",
    "thaw",
    "unplug",
    "plug",
    "kubelet-off",
    "kubelet-on",
    "cut",
    "mend",
    "exec",
)


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        if os.geteuid() == 0:
            make_cache()
        elif parsed.command not in ("preflight", "kubectl", "helm"):
            raise ClusterError(preflight.missing()[0])
        return int(_do(parsed) or 0)
    except ClusterError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _do(args: argparse.Namespace) -> int | None:
    match args.command:
        case "preflight":
            print("\n".join(preflight.missing()) or "All that the cluster needs is here.")
            return len(preflight.missing()) > 0
        case "build":
            packages.install()
            build.build()
        case "images":
            packages.install()
            build.build()
            images.images()
        case "venv":
            environment.venv()
        case "prepare":
            lifecycle.prepare()
        case "up":
            lifecycle.up(args.nodes, args.node_grace, args.owner)
            print(f"export KUBECONFIG={RUN}/host.conf PATH={BIN}:$PATH")
        case "down":
            lifecycle.down()
        case "status":
            print("up" if lifecycle.is_healthy() else "not up, or not healthy")
            return not lifecycle.is_healthy()
        case "watch":
            lifecycle.watch(args.owner)
        case "containerfiles":
            print("\n".join(map(str, containerfiles.build(args.parts))))
        case "load":
            nodes.load(_state(), args.archives)
        case "node":
            return _node(_state(), args.name, args.action, args.rest)
        case "usage":
            _usage(_state(), args.seconds)
        case "kubectl" | "helm":
            return _replace([BIN / args.command, f"--kubeconfig={RUN}/host.conf", *args.rest])
        case "inside":
            return _replace(in_netns(netns_file(CONTROL), args.rest))
    return None


def _node(found: State, name: str, action: str, rest: list[str]) -> int | None:
    if name not in found.names:
        raise ClusterError(f"there is no node {name}: they are {', '.join(found.names)}")
    match action:
        case "on":
            nodes.power_on(found, name)
        case "off":
            nodes.power_off(name)
        case "kill":
            nodes.kill(name)
        case "freeze":
            nodes.freeze(found, name)
        case "thaw":
            nodes.thaw(found, name)
        case "unplug":
            network.unplug(name)
        case "plug":
            network.plug(name)
        case "kubelet-off":
            nodes.kubelet_off(name)
        case "kubelet-on":
            nodes.kubelet_on(name)
        case "cut":
            network.cut(name, rest)
        case "mend":
            network.mend(name)
        case "exec":
            return _replace([*nodes.inside(name), *rest])
    return None


def _state() -> State:
    found = state.load()
    if found is None:
        raise ClusterError("no cluster is up: `ctl up` brings it up")
    return found


def _replace(command: Sequence[str | Path]) -> int:
    return subprocess.run([str(part) for part in command]).returncode


def _usage(found: State, seconds: float) -> None:
    """CPU in percent of a core and resident memory, by node."""
    names = [CONTROL, *found.names]

    def used_ns() -> list[int]:
        files = (found.cgroup("cpuacct", name) / "cpuacct.usage" for name in names)
        return [int(file.read_text()) for file in files]

    before = used_ns()
    time.sleep(seconds)
    total_mib = 0.0
    for name, start, end in zip(names, before, used_ns(), strict=True):
        text = (found.cgroup("memory", name) / "memory.stat").read_text().split()
        rss_mib = int(text[text.index("total_rss") + 1]) / 2**20
        total_mib += rss_mib
        print(f"{name}: {(end - start) / seconds / 1e7:.1f} % of a core, {rss_mib:.0f} MiB")
    print(f"resident memory in all: {total_mib:.0f} MiB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ctl", description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    sub.add_parser("preflight", help="what this machine lacks, in a sentence each")
    sub.add_parser("build", help="the Go programs")
    sub.add_parser("images", help="the image archives, and the store that nodes clone")
    sub.add_parser("venv", help="the virtual environment that the pods run")
    sub.add_parser("prepare", help="all of these, where not up to date")
    up = sub.add_parser("up", help="prepare, then bring the cluster up")
    up.add_argument("--nodes", type=int, default=int(os.environ.get("NODES", "3")))
    up.add_argument(
        "--node-grace",
        type=int,
        default=int(os.environ.get("NODE_GRACE", "8")),
        help="seconds until a silent node is NotReady",
    )
    up.add_argument("--owner", type=int, help="a process id: once it ends, so may the cluster")
    sub.add_parser("down", help="end it all, and restore the host's sysctls")
    sub.add_parser("status", help="whether it is up and all nodes are ready")
    real = sub.add_parser("containerfiles", help="images/*/Containerfile, built with buildah")
    real.add_argument("parts", nargs="+", choices=images.PARTS)
    load = sub.add_parser("load", help="import image archives into every node")
    load.add_argument("archives", nargs="+", type=Path)
    node = sub.add_parser("node", help="break a node, or mend it")
    node.add_argument("name", help="n1, n2, ...")
    node.add_argument("action", choices=NODE_ACTIONS)
    node.add_argument("rest", nargs=argparse.REMAINDER, help="cut: addresses; exec: a command")
    watch = sub.add_parser("watch", help="take it down once this process has ended")
    watch.add_argument("owner", type=int)
    usage = sub.add_parser("usage", help="CPU and memory of the cluster")
    usage.add_argument("seconds", nargs="?", type=float, default=30)
    for name, about in (
        ("kubectl", "the cluster's kubectl"),
        ("helm", "helm on the cluster"),
        ("inside", "a command where pods and Services can be reached"),
    ):
        sub.add_parser(name, help=about, add_help=False).add_argument(
            "rest", nargs=argparse.REMAINDER
        )
    return parser
