"""A bridge in the control plane's namespace, a cable to each node, routes to each node's pods."""

from cluster.paths import (
    API_IP,
    CONTROL,
    LINK_PREFIX,
    SERVICE_CIDR,
    netns,
    netns_file,
    node_ip,
    pod_cidr,
)
from cluster.shell import in_netns, run


def lay(nodes: list[str]) -> None:
    _add(CONTROL)
    _ip(CONTROL, "link", "add", "br0", "type", "bridge")
    _ip(CONTROL, "addr", "add", f"{API_IP}/{LINK_PREFIX}", "dev", "br0")
    _ip(CONTROL, "link", "set", "br0", "up")
    # Service addresses need a route before kube-proxy rewrites them.
    _ip(CONTROL, "route", "add", SERVICE_CIDR, "dev", "br0")
    for node in nodes:
        _add(node)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", netns(node))
        _ip(CONTROL, "link", "add", node, *cable)
        _ip(CONTROL, "link", "set", node, "master", "br0", "up")
        _ip(node, "addr", "add", f"{node_ip(node)}/{LINK_PREFIX}", "dev", "eth0")
        plug(node)
    for name in (CONTROL, *nodes):
        for node in nodes:
            if name != node:
                _ip(name, "route", "add", pod_cidr(node), "via", node_ip(node))


def remove(nodes: list[str]) -> None:
    for name in (*nodes, CONTROL):
        if netns_file(name).exists():
            run("ip", "netns", "del", netns(name), check=False)


def plug(node: str) -> None:
    """Connects the node's cable; its default route went when the link did."""
    _ip(CONTROL, "link", "set", node, "up")
    _ip(node, "link", "set", "eth0", "up")
    _ip(node, "route", "replace", "default", "via", API_IP)


def unplug(node: str) -> None:
    _ip(CONTROL, "link", "set", node, "down")


def forget(node: str) -> None:
    """What a machine's network loses when its power goes."""
    run(*in_netns(netns_file(node), ["nft", "flush", "ruleset"]))
    _ip(node, "link", "del", "cni0", check=False)


def cut(node: str, peers: list[str]) -> None:
    """Drops all that passes between the node, its pods included, and these addresses.

    Peers are addresses or networks as nft writes them. Traffic between two pods of one node goes
    over its bridge and is not seen here.
    """
    rules = "\n".join(
        f"add rule inet stopway-cut {chain} ip {end} {{ {', '.join(peers)} }} drop"
        for chain in ("forward", "input", "output")
        for end in ("saddr", "daddr")
    )
    chains = "\n".join(
        f"add chain inet stopway-cut {hook} {{ type filter hook {hook} priority -10; }}"
        for hook in ("forward", "input", "output")
    )
    _nft(node, f"add table inet stopway-cut\n{chains}\n{rules}\n")


def mend(node: str) -> None:
    """Ends what `cut` began."""
    _nft(node, "add table inet stopway-cut\ndelete table inet stopway-cut\n")


def _nft(node: str, text: str) -> None:
    run(*in_netns(netns_file(node), ["nft", "-f", "-"]), input=text)


def _add(name: str) -> None:
    run("ip", "netns", "add", netns(name))
    _ip(name, "link", "set", "lo", "up")
    run(*in_netns(netns_file(name), ["sysctl", "-qw", "net.ipv4.ip_forward=1"]))


def _ip(name: str, *arguments: str, check: bool = True) -> None:
    run("ip", "-n", netns(name), *arguments, check=check)
