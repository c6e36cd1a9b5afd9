"""Something happens just when a request is where few are for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stopway_core.events import LeaseLost, Mode, ModeChanged
from stopway_core.types import Reason, Stop, Target
from stopway_sim.group import Group
from stopway_sim.places import RARE, place_of
from stopway_sim.scenario import MS

if TYPE_CHECKING:
    from stopway_sim.world import World


def ambush(world: World, group: Group) -> None:
    """Let something happen to a request that is in one of the rarer places."""
    planner = group.planner
    found = [c for c in planner.requests.by_key.values() if place_of(planner, c) in RARE]
    if not found:
        return
    choice = world.chooser.pick(found)
    submission = choice.submission
    gateway = next(g for g in world.gateways if g.name == submission.gateway)
    what = world.chooser.below(8)
    if what < 4:
        world.ambushes += 1
        kind = Target(uids=(choice.uid,)) if what else Target(conversation=submission.conversation)
        gateway.stop_now(
            Stop(
                f"ambush-{world.ambushes}", kind, Reason.CLIENT_CANCEL, submission.tenant,
                False, world.now, submission.traceparent,
            )
        )  # fmt: skip
    elif what == 4:
        world.post(ModeChanged(Mode.ABORTED))
        world.clock.after(5 * MS, lambda: world.post(ModeChanged(Mode.RUNNING)))
    elif what == 5:
        world.post(LeaseLost(gateway.name))
        gateway.disconnect()
    elif what == 6 and world.scenario.deaths:
        world.kill(world.chooser.below(world.scenario.shape.ranks))
