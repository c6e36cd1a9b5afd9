"""docs/stops.md: when a stop takes effect and when the blocks are back, as measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stopway_core.events import StopSignal
from stopway_core.ledger import Dropped
from stopway_core.policies import POLICIES
from stopway_core.types import Reason, Stop, Target
from stopway_sim.failure import require
from stopway_sim.measure import SETUPS, START, STOPS, Bench, Measured, measure, run, shared
from stopway_sim.places import POSSIBLE, Cause, Place

_HEAD = """\
# When a stop takes effect

<!-- Written by `python -m stopway_sim table`; a test checks that it is current. -->

Whatever ends a request, it ends in one *turn*: an entry of the leader's log, which every rank
applies at the same place. A turn is made as soon as something has happened, and takes well under a
millisecond, so "the same turn" below means: as soon as the leader knows. From then on the request
computes nothing new, its client gets nothing more, and its blocks can be used by the steps that
come next, since those are ordered behind the ones that may still write to them. What is *not*
ordered so has to wait for the steps in flight: when they have drained, a receipt says `reclaimed`,
and until then its `pending_on` names the ranks and the step. Such use (a transfer to another group,
a load from host memory) exists in the simulation only; the engine has none yet.

The tables are measured: each combination is set up and run in the simulated group, with the real
planner and the real ledger, two pipeline stages (one where two steps of one request are in flight),
blocks of 4 tokens and a prompt of 11.

"""

_BY_CAUSE = """\
## Where a request is, and what stops it

In how many turns from when the leader has it (`0`: in that very turn); `-` where it cannot be: a
request that has left the queue has met its queue deadline, one with a token that for the first.
A lost rank is not in the table: it ends the epoch of the group, all requests fail at once with
`rank_lost`, and all blocks are back when the processes are gone.

- *Stop by uid* names requests: a cancel, and what a gateway sends when a client has left.
- *Stop by selector* means all of a conversation, of a tenant, or of everybody.
- *Lease lost*: the connection from a gateway to the group is gone, and with it whoever could be
  answered through it; all requests that came on it end.
- *End of drainSeconds*: a pod has to go, and what has not finished in that time ends.
- *Pause abort*: an admin has paused the group with the mode `abort`.

*Not yet there*: the stop has come before its request. It is kept by the uid, and its turns are
counted from when the request comes; nothing but a uid can mean what is not there. A stop of what
has already ended changes nothing, and its receipt says `already_finished`.

"""

_BLOCKS = """\

## When the blocks are back

It does not depend on the cause. *Steps to drain*: that were in flight with the request when it
ended. They run to their end for whoever else is in them; under `native` the rows of a request that
has ended leave a step that runs, between two layers, where that saves enough, and the step ends
sooner. *Freed* blocks have no holder any more; *cached* ones are full of confirmed tokens, and stay
for whoever comes with the same prefix until somebody needs them; *lent* ones are still held by a
request that shares them. *Pending on*: what the receipt of a stop waits for as soon as it has taken
effect.

"""

_POLICIES = """\

## Under the other policies

A service's `stop.policy` can be another engine's way to stop. Then a stop may take effect later:
turns, steps that had to complete before it, and tokens that its client still got. `-`: this policy
never has a request there. What a policy adds before that, until the leader has the stop, is in
[policies.md](policies.md).

"""

_TITLES = {Cause.DRAIN: "end of drainSeconds"}


def document() -> str:
    """The whole file."""
    return _HEAD + _BY_CAUSE + _by_cause() + _BLOCKS + _blocks() + _POLICIES + _policies()


def _by_cause() -> str:
    early = _before("native")
    rows = [[Place.UNBORN, *(str(early.turns) if c is Cause.UID else "-" for c in STOPS)]]
    for place in SETUPS:
        found = [measure(place, c) if place in POSSIBLE[c] else None for c in STOPS]
        rows.append([place, *("-" if one is None else str(one.turns) for one in found)])
    return _table(["", *(_TITLES.get(c, c) for c in STOPS)], rows)


def _before(policy: str) -> Measured:
    """A stop that comes before its request; counted from when that comes."""
    bench = Bench(Cause.UID, policy)
    stop = Stop("s", Target(uids=("a",)), Reason.CLIENT_CANCEL, "t", False, START)
    bench.turn(StopSignal(stop))
    planned = bench.turn(bench.submit("a", (1, 2, 3)))
    turns = 0
    while planned is not None and not planned.outputs.ended:
        turns += 1
        planned = bench.turn()
    require(planned is not None, "a stop that came before its request hangs")
    require(not bench.dropped, "a request was admitted whose stop came before it")
    return Measured(turns, 0, 0, 0, Dropped(), ())


def _blocks() -> str:
    rows = [_row(Place.UNBORN, [_before("native")])]
    for place in SETUPS:
        found = [one for c in STOPS if place in POSSIBLE[c] and (one := measure(place, c))]
        rows.append(_row(place, found))
    together = run(shared(Cause.UID, "native"), Cause.UID)
    assert together is not None
    rows.append(_row("decoding, prompt shared with another choice", [together]))
    return _table(["", "steps to drain", "freed", "cached", "lent", "pending on"], rows)


def _row(place: str, found: Sequence[Measured]) -> list[str]:
    most = max(found, key=lambda one: one.drain)
    assert {one.dropped for one in found} == {most.dropped}, f"{place}: it depends on the cause"
    waits = "each rank to apply the turn"
    if most.drain:
        waits += " and to run the step" + ("s" if most.drain > 1 else "")
    return [place, str(most.drain), *map(str, most.dropped), waits]


def _policies() -> str:
    rows = [[Place.UNBORN, *(_late(_before(name)) for name in POLICIES)]]
    for place in SETUPS:
        rows.append([place, *(_late(measure(place, Cause.UID, name)) for name in POLICIES)])
    return _table(["", *POLICIES], rows)


def _late(found: Measured | None) -> str:
    if found is None:
        return "-"
    parts = [_count(found.turns, "turn"), _count(found.steps, "step")]
    parts.append(_count(found.delivered, "token"))
    return ", ".join(filter(None, parts)) or "same turn"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
