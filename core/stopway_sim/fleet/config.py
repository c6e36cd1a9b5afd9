"""What fleet is simulated, and what goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_sim.fleet.cost import CostModel
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.limits import SECONDS_MAX, is_duration

HOST_LOADS_PER_S_MAX = 10_000.0
DISPATCH_WAIT_S = 10.0  # a gateway waits so long for a ready group


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank of ``group`` dies ``at_s``: its epoch ends, and it is back ``down_s`` later."""

    at_s: float
    group: int
    down_s: float


@dataclass(frozen=True, slots=True)
class HostLoads:
    """Off-queue writers: host memory loads that take blocks of each group.

    Poisson at ``per_s`` for each group; each holds ``blocks`` for ``seconds``. One that finds too
    few blocks is given up and counted.
    """

    per_s: float = 0.0
    blocks: int = 16
    seconds: float = 0.02


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """``groups`` alike, with one policy.

    With ``split`` the groups are pairs of a prefill group (even) and its decode group (odd). The
    first ``checked`` groups also apply every turn on a follower, through the wire, and compare.
    """

    groups: int = 4
    cost: CostModel = field(default_factory=CostModel)
    policy: Policy = field(default_factory=lambda: POLICIES["native"])
    split: bool = False
    checked: int = 0
    host_loads: HostLoads = field(default_factory=HostLoads)
    faults: tuple[RankLost, ...] = ()
    redis_down: tuple[tuple[float, float], ...] = ()  # (from, to), seconds

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise FleetError(f"a fleet of {self.groups} groups; give at least 1")
        if self.checked < 0:
            raise FleetError(f"{self.checked} groups to check; give 0 or more")
        if self.checked > self.groups:
            raise FleetError(
                f"{self.checked} groups to check; give at most {self.groups}, as there are"
            )
        if self.split and self.groups % 2:
            raise FleetError(f"a split fleet is made of pairs; {self.groups} groups is odd")
        longest = -(-self.cost.max_model_len // self.cost.block_size)
        if (self.split or self.host_loads.per_s) and self.cost.blocks * 15 // 16 < 2 * longest:
            raise FleetError(
                f"off-queue use beside a request of {self.cost.max_model_len} tokens needs more "
                f"than {self.cost.blocks} blocks; give at least {2 * longest * 16 // 15 + 1}, or "
                "a smaller max_model_len"
            )
        loads = self.host_loads
        much = 0 <= loads.per_s <= HOST_LOADS_PER_S_MAX
        if not much or loads.blocks < 1 or not is_duration(loads.seconds):
            raise FleetError(
                f"host loads: 0 to {HOST_LOADS_PER_S_MAX:g} a second, of 1 block or more, for 0 s "
                "or more"
            )
        self._check_faults()

    @property
    def cells(self) -> int:
        """Independent parts: groups, or pairs of them."""
        return self.groups // 2 if self.split else self.groups

    def _check_faults(self) -> None:
        for fault in self.faults:
            if not 0 <= fault.group < self.groups:
                raise FleetError(
                    f"a rank of group {fault.group} is to be lost; groups are 0 to "
                    f"{self.groups - 1}"
                )
            if not is_duration(fault.at_s):
                raise FleetError(
                    f"a lost rank's AT is {fault.at_s:g}; give 0 to {SECONDS_MAX:g} seconds"
                )
            if not fault.down_s or not is_duration(fault.down_s):
                raise FleetError(
                    f"a lost rank's DOWN_S is {fault.down_s:g}; give more than 0, at most "
                    f"{SECONDS_MAX:g}"
                )
        for start, end in self.redis_down:
            if not 0 <= start < end:
                raise FleetError(
                    f"Redis is down {start:g}:{end:g}: TO must be after FROM, and FROM 0 or more"
                )
