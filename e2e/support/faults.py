"""Losing nodes and links of the project's own cluster, and getting them back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster import network, nodes
from cluster.paths import node_ip, pod_cidr
from cluster.state import State

from support.kubectl import Kubectl, node_of
from support.progress import say, wait_for

READY_S = 60.0


class Faults:
    """Every fault has an end of the same shape; `heal` ends all that are left."""

    def __init__(self, state: State, kubectl: Kubectl) -> None:
        self._state = state
        self._kubectl = kubectl
        self.nodes: Sequence[str] = state.names
        self.node_grace_s = state.node_grace_s
        self._hurt: set[str] = set()

    def power_off(self, node: str) -> None:
        """The plug is pulled: its processes are gone and its cable is dead, all at once."""
        self._begin(node, "power off")
        nodes.power_off(node)

    def power_on(self, node: str) -> None:
        """It boots with its disk as it was."""
        say(f"{node}: power on")
        nodes.power_on(self._state, node)

    def freeze(self, node: str) -> None:
        """It hangs: nothing runs, and its kernel still acknowledges what it is sent."""
        self._begin(node, "freeze")
        nodes.freeze(self._state, node)

    def thaw(self, node: str) -> None:
        say(f"{node}: thaw")
        nodes.thaw(self._state, node)

    def unplug(self, node: str) -> None:
        """Its cable is pulled: its pods live on, and reach only each other."""
        self._begin(node, "cable out")
        network.unplug(node)

    def plug(self, node: str) -> None:
        say(f"{node}: cable in")
        network.plug(node)

    def kubelet_off(self, node: str) -> None:
        """Its pods live on and answer; the control plane thinks that it is lost."""
        self._begin(node, "kubelet off")
        nodes.kubelet_off(node)

    def kubelet_on(self, node: str) -> None:
        say(f"{node}: kubelet on")
        nodes.kubelet_on(node)

    def cut_from_addresses(self, node: str, addresses: Sequence[str]) -> None:
        """Drops all between the node, its pods included, and these addresses or networks."""
        self._begin(node, f"cut from {', '.join(addresses)}")
        network.cut(node, list(addresses))

    def cut_from_pods(self, node: str, kubectl: Kubectl, selector: str) -> None:
        """Drops all between the node and these pods, which must run on other nodes."""
        pods = kubectl.pods(selector)
        if not pods or any(node_of(pod) == node for pod in pods):
            raise ValueError(f"pods of {selector} must exist, and none of them on {node}")
        self.cut_from_addresses(node, [pod["status"]["podIP"] for pod in pods])

    def cut_between(self, node: str, other: str) -> None:
        """The two nodes and their pods lose each other; both keep the control plane."""
        self.cut_from_addresses(node, [node_ip(other), pod_cidr(other)])

    def mend(self, node: str) -> None:
        """Ends every cut of this node."""
        say(f"{node}: mended")
        network.mend(node)

    @contextmanager
    def lost(self, node: str) -> Iterator[None]:
        """Powered off, and seen as such by the control plane; powered on again at the end."""
        self.power_off(node)
        try:
            self.wait_seen_lost(node)
            yield
        finally:
            self.power_on(node)
            self.wait_ready(node)

    @contextmanager
    def frozen(self, node: str) -> Iterator[None]:
        """Frozen, seen or not; thawed at the end."""
        self.freeze(node)
        try:
            yield
        finally:
            self.thaw(node)
            self.wait_ready(node)

    @contextmanager
    def unplugged(self, node: str) -> Iterator[None]:
        """Without its cable, seen or not; plugged in at the end."""
        self.unplug(node)
        try:
            yield
        finally:
            self.plug(node)
            self.wait_ready(node)

    @contextmanager
    def partitioned(self, node: str, other: str) -> Iterator[None]:
        """`cut_between`, mended at the end."""
        self.cut_between(node, other)
        try:
            yield
        finally:
            self.mend(node)

    def wait_seen_lost(self, node: str, seconds: float = READY_S) -> None:
        wait_for(
            f"{node} is seen as lost",
            lambda: self._kubectl.node_ready(node) in ("Unknown", "False"),
            seconds,
        )

    def wait_ready(self, node: str, seconds: float = READY_S) -> None:
        wait_for(f"{node} is ready", lambda: self._kubectl.node_ready(node) == "True", seconds)

    def heal(self) -> None:
        """Ends every fault, whatever a test left, and waits until all nodes are ready."""
        hurt, self._hurt = self._hurt, set()
        for node in sorted(hurt):
            nodes.thaw(self._state, node)
            network.mend(node)
            if nodes.is_on(node):
                network.plug(node)
                nodes.kubelet_on(node)
            else:
                nodes.power_on(self._state, node)
        for node in sorted(hurt):
            self.wait_ready(node)

    def _begin(self, node: str, what: str) -> None:
        if node not in self.nodes:
            raise ValueError(f"there is no node {node}: they are {', '.join(self.nodes)}")
        say(f"{node}: {what}")
        self._hurt.add(node)
