"""What becomes of each group: integers and flags in, at most one step per group out.

A group is always replaced whole. Its StatefulSet gets the new template together with zero
replicas, so that all its pods drain at once and none of another revision can start beside them;
when the last is gone it gets its replicas back. Every intention can be read off the objects, so an
operator that starts anew goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

RELEASE_FIRST_S = 60.0
RELEASE_MAX_S = 900.0
UNLISTED_MAX_S = 60.0  # a rollout waits no longer for a gateway to find a group


class Step(StrEnum):
    """What to do with a group's StatefulSet."""

    START = "start"  # wanted template, all replicas
    STOP = "stop"  # wanted template, no replicas
    DRAIN = "drain"  # no replicas; the template stays
    RELEASE = "release"  # wanted template, no replicas, and a note of when
    REMOVE = "remove"  # delete it, with what else the group has


class Phase(StrEnum):
    """Where a group is."""

    READY = "Ready"
    FORMING = "Forming"
    DRAINING = "Draining"
    RELEASED = "Released"
    ABSENT = "Absent"
    BLOCKED = "Blocked"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is seen of one group. ``size`` is the wanted number of pods."""

    index: int
    size: int = 1
    exists: bool = False
    blocked: bool = False  # its name is taken, or it is being deleted
    current: bool = False  # its template is the wanted one
    replicas: int = 0
    pods: int = 0  # that exist, terminating ones too
    terminating: int = 0
    counted: int = 0  # by the StatefulSet controller: its news and those of pods are in no order
    synced: bool = True  # the StatefulSet controller has seen the last change
    ready: bool = False  # all its pods are, as one revision, in a complete epoch
    unlisted_since: float | None = None  # ready, and a gateway that answers can't send to it
    mixed: bool = False  # a pod of another revision than its template's
    incomplete_since: float | None = None  # some of its pods have a node, others find none
    born: float = 0.0  # its youngest pod
    released_at: float | None = None
    releases: int = 0
    jitter: float = 0.0  # of this group, 0 to 1

    @property
    def empty(self) -> bool:
        """Whether a group that was told to have no pods has none, as far as anybody knows."""
        return self.synced and not self.pods and not self.counted

    def overlooked(self, now: float) -> bool:
        """Whether a gateway does not send to this group, though it had the time to find it."""
        return self.unlisted_since is not None and now >= self.unlisted_since + UNLISTED_MAX_S

    def available(self, now: float) -> bool:
        """Whether it may be counted on while another group is away."""
        return self.ready and (self.unlisted_since is None or self.overlooked(now))

    @property
    def retry_at(self) -> float | None:
        """When a released group is tried again."""
        if self.released_at is None:
            return None
        wait = min(RELEASE_MAX_S, RELEASE_FIRST_S * 2.0 ** (max(1, self.releases) - 1))
        return self.released_at + wait * (1 + self.jitter / 2)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the spec allows."""

    wanted: int
    max_unavailable: int = 1
    incomplete_s: float = 300.0


def phase(facts: Facts) -> Phase:
    """Where the group is."""
    if facts.blocked:
        return Phase.BLOCKED
    if not facts.exists:
        return Phase.ABSENT
    if facts.replicas == 0:
        if not facts.empty:
            return Phase.DRAINING
        return Phase.ABSENT if facts.released_at is None else Phase.RELEASED
    return Phase.READY if facts.ready else Phase.FORMING


def decide(groups: Sequence[Facts], limits: Limits, now: float) -> dict[int, Step]:
    """The next step of each group that needs one, by index.

    ``groups`` has every wanted index, and those beyond that still exist.
    """
    steps: dict[int, Step] = {}
    wanted = [group for group in groups if group.index < limits.wanted]
    for group in groups:
        step = _beyond(group) if group.index >= limits.wanted else _settle(group, now)
        if step is not None:
            steps[group.index] = step
    for index in _replace(wanted, limits, steps, now):
        steps[index] = Step.STOP
    released = _release(wanted, limits, steps, now)
    if released is not None:
        steps[released] = Step.RELEASE
    return steps


def next_time(groups: Sequence[Facts], limits: Limits, now: float) -> float | None:
    """When time alone will ask for another step."""
    times = [group.retry_at for group in groups if phase(group) is Phase.RELEASED]
    if limits.incomplete_s:
        times += [
            max(group.incomplete_since, _last_release(groups)) + limits.incomplete_s
            for group in groups
            if group.incomplete_since is not None
        ]
    return min((at for at in times if at is not None and at > now), default=None)


def _beyond(group: Facts) -> Step | None:
    """Scale-down: drain, then remove."""
    if group.blocked:
        return None
    if group.exists and group.replicas:
        return Step.DRAIN
    return Step.REMOVE if group.empty else None


def _settle(group: Facts, now: float) -> Step | None:
    """Everything that needs no budget."""
    if group.blocked:
        return None
    if not group.exists:
        return None if group.terminating else Step.START  # pods that stayed are taken over
    if group.replicas == 0:
        if not group.empty:
            return None
        retry_at = group.retry_at if group.current else None
        return None if retry_at is not None and now < retry_at else Step.START
    if not group.current:
        return None
    if group.mixed:
        return Step.STOP
    return Step.START if group.replicas != group.size else None


def _replace(
    wanted: Sequence[Facts], limits: Limits, steps: dict[int, Step], now: float
) -> list[int]:
    """Which groups of an old revision are replaced now: those that serve nobody come first.

    New groups that are not ready yet bound how many more may follow, so that a bad revision stays
    with the first ones, and a group that is away for a moment is not drawn into it. A group that a
    gateway has not found yet is no reason to take another from it.
    """
    old = [g for g in wanted if g.exists and not g.blocked and not g.current and g.replicas]
    in_flight = sum(1 for g in wanted if g not in old and not g.ready)
    unavailable = {g.index for g in wanted if not g.available(now)}
    chosen = []
    for group in sorted(old, key=lambda g: (g.ready, -g.index)):
        if group.ready:
            allowed = len(unavailable - {group.index}) < limits.max_unavailable
            if allowed:
                unavailable.add(group.index)
        else:
            allowed = in_flight < limits.max_unavailable
        if allowed:
            in_flight += 1
            chosen.append(group.index)
    return [index for index in chosen if index not in steps]


def _last_release(groups: Sequence[Facts]) -> float:
    return max((group.released_at or 0.0 for group in groups), default=0.0)


def _release(
    wanted: Sequence[Facts], limits: Limits, steps: dict[int, Step], now: float
) -> int | None:
    """The youngest group that holds nodes in vain; one at a time, so that others may fill up."""
    if not limits.incomplete_s or now < _last_release(wanted) + limits.incomplete_s:
        return None
    stuck = [
        group
        for group in wanted
        if group.incomplete_since is not None
        and now >= group.incomplete_since + limits.incomplete_s
        and group.index not in steps
    ]
    return max(stuck, key=lambda g: (g.born, g.index)).index if stuck else None
