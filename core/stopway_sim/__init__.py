"""The simulated world: the real planner and the real replicas, everything around them faked.

Standard library and ``stopway_core`` only. Time is an integer of microseconds, chance comes from
one seeded source, so a seed is a run: ``make sim SEED=7`` replays it, bit for bit.

``Group`` is one epoch of a group without time; ``World`` drives it with delays and faults,
``explore`` with every interleaving of a tiny case.
"""

from stopway_sim.choices import Chooser, Exhaustive, Seeded
from stopway_sim.failure import SimFailure
from stopway_sim.group import Group, GroupShape
from stopway_sim.scenario import Scenario
from stopway_sim.world import Report, World, run_seed

__all__ = [
    "Chooser",
    "Exhaustive",
    "Group",
    "GroupShape",
    "Report",
    "Scenario",
    "Seeded",
    "SimFailure",
    "World",
    "run_seed",
]
