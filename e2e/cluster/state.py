"""What a running cluster has made on this machine, so that `down` can undo all of it.

It is written before anything is made.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.paths import RUN, STATE


@dataclass
class State:
    folder: str  # its `RUN`
    nodes: int
    node_grace_s: int
    owner: int | None = None  # the process whose end makes the cluster garbage; None: a person's
    api_port: int = 0  # of the API on the host's loopback
    sysctls: dict[str, str] = field(default_factory=dict)  # as they were
    cgroups: dict[str, str] = field(default_factory=dict)  # controller -> the cluster's directory
    complete: bool = False  # `up` came to its end

    @property
    def names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    @property
    def is_of_this_checkout(self) -> bool:
        return self.folder == str(RUN)

    def save(self) -> None:
        STATE.parent.mkdir(exist_ok=True)
        new = STATE.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1))
        os.replace(new, STATE)

    def cgroup(self, controller: str, name: str) -> Path:
        return Path(self.cgroups[controller], name)


def of_machine() -> State | None:
    """The cluster that is up on this machine, whichever checkout's."""
    return State(**json.loads(STATE.read_text())) if STATE.exists() else None


def load() -> State | None:
    """This checkout's cluster; None: none of it is up."""
    found = of_machine()
    return found if found is not None and found.is_of_this_checkout else None


def of_another_checkout() -> str | None:
    """Where the files of another checkout's cluster are, as long as it is in use."""
    found = of_machine()
    if found is None or found.is_of_this_checkout or is_abandoned(found):
        return None
    return found.folder


def is_abandoned(state: State) -> bool:
    """Its owner is gone, or its processes are (the machine's session has ended)."""
    owner_is_gone = state.owner is not None and not Path("/proc", str(state.owner)).exists()
    return owner_is_gone or not processes(state)


def processes(state: State, name: str = "") -> list[int]:
    """The ids of all processes of the cluster, or of one node."""
    found: set[int] = set()
    top = state.cgroups.get("pids")
    if top is not None:
        for file in Path(top, name).rglob("cgroup.procs"):
            try:
                found.update(map(int, file.read_text().split()))
            except OSError:  # the cgroup went meanwhile
                continue
    return sorted(found)
