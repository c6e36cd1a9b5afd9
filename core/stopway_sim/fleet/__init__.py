"""A fleet in simulated time: the real planner of every group, and a model of everything else.

A group is the engine's own ``Planner`` and its leader's ``Replica``; only the time that a step, a
message or a disconnect's detection takes is modelled (``CostModel``). No model runs and no clock
is read, so a fleet of hundreds of groups fits on a laptop and a seed gives the same report.
"""

from stopway_sim.fleet.calibrate import Figure, SmallRun, beside, calibrate
from stopway_sim.fleet.config import FleetConfig, HostLoads, RankLost
from stopway_sim.fleet.cost import CostModel
from stopway_sim.fleet.errors import FleetError
from stopway_sim.fleet.report import Report
from stopway_sim.fleet.run import simulate
from stopway_sim.fleet.scenarios import SCENARIOS, Scenario
from stopway_sim.fleet.tracefile import read_trace
from stopway_sim.fleet.workload import Cancels, Lengths, Spec, Storm, Workload

__all__ = [
    "SCENARIOS",
    "Cancels",
    "CostModel",
    "Figure",
    "FleetConfig",
    "FleetError",
    "HostLoads",
    "Lengths",
    "RankLost",
    "Report",
    "Scenario",
    "SmallRun",
    "Spec",
    "Storm",
    "Workload",
    "beside",
    "calibrate",
    "read_trace",
    "simulate",
]
