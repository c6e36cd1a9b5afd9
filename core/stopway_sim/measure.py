"""One request in one place, one cause that ends it there: what happens, and when.

Each run is a group of its own, driven by hand to the place; nothing in it is left to chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stopway_core.config import PlannerConfig
from stopway_core.events import (
    DrainStarted,
    Event,
    LeaseLost,
    Mode,
    ModeChanged,
    StopSignal,
    Submit,
)
from stopway_core.ledger import Dropped
from stopway_core.planner import Planned
from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines, Reason, SamplingParams, Stop, Submission, Target
from stopway_sim.failure import require
from stopway_sim.group import Group, GroupShape
from stopway_sim.places import POSSIBLE, Cause, Place, place_of

START = 1_000.0
LATE = 10.0  # seconds after which a deadline of 5 has passed
_LIMITS = {Cause.QUEUE: "queue", Cause.FIRST_TOKEN: "first_token", Cause.TOTAL: "total"}
_FINISHED = (Reason.LENGTH, Reason.EOS)
_A = tuple(range(1, 12))
# Holds every three tokens of a vocabulary of three: whatever comes, a draft follows.
_ALL_TRIPLES = (
    0,
    0,
    0,
    1,
    0,
    0,
    2,
    0,
    1,
    1,
    0,
    1,
    2,
    0,
    2,
    1,
    0,
    2,
    2,
    1,
    1,
    1,
    2,
    1,
    2,
    2,
    2,
    0,
    0,
)
STOPS = tuple(
    cause
    for cause, places in POSSIBLE.items()
    if Place.QUEUED in places and cause is not Cause.RANK
)
"""What can end a request from outside."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a cause did. Turns and steps are counted from when the leader had it."""

    turns: int  # 0: in the turn that the leader took with it
    steps: int  # that had to complete before it took effect
    delivered: int  # tokens that the client got after the leader had it
    drain: int  # steps in flight with the request when it ended
    dropped: Dropped  # blocks
    pending: tuple[str, ...]  # what the receipt waited for when it took effect


class Bench:
    """A group, and the request ``a`` that is to be ended."""

    def __init__(self, cause: Cause, policy: str, **config: int) -> None:
        shape = GroupShape(
            pipeline=config.pop("stages", 2),
            blocks=config.pop("blocks", 16),
            vocab=config.pop("vocab", 97),
        )
        config.setdefault("window", shape.pipeline)
        self.now = START
        self.group = Group(
            shape,
            PlannerConfig(
                max_model_len=shape.blocks * shape.block_size,
                stages=shape.pipeline,
                policy=POLICIES[policy],
                **config,  # type: ignore[arg-type]
            ),
        )
        self.late: list[Event] = []  # results that come with the cause, in one turn
        name = _LIMITS.get(cause)
        self._limits = Deadlines(**({name: 5.0} if name else {}))
        self.dropped: dict[int, Dropped] = {}
        self._watch()

    def _watch(self) -> None:
        replica, drops = self.group.ranks[0].replica, self.dropped
        end = replica.end

        def watched(rid: int) -> tuple[Dropped, int]:
            found = end(rid)
            drops[rid] = found[0]
            return found

        replica.end = watched  # type: ignore[method-assign]

    def submit(
        self,
        uid: str,
        prompt: tuple[int, ...],
        tokens: int = 9,
        *,
        choices: int = 1,
        grammar: str = "",
    ) -> Submit:
        """A request of its own gateway and conversation; ``a`` has the deadline."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        limits = self._limits if uid == "a" else Deadlines()
        return Submit(
            Submission(
                uid, 1, "t", prompt, params, START, choices=choices, grammar=grammar,
                deadlines=limits, conversation=uid, gateway=uid,
            )
        )  # fmt: skip

    def turn(self, *events: Event) -> Planned | None:
        """One turn, which followers apply at once."""
        got = self.group.turn(self.now, list(events))
        if got is None:
            return None
        for rank in self.group.ranks[1:]:
            self.group.deliver(rank, got[1])
        return got[0]

    def step(self) -> list[Event]:
        """Run the oldest step to its end; its result."""
        return [self.group.run_oldest()]


# --- how to get to a place -------------------------------------------------------------------


def _compiling(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy)
    bench.turn(bench.submit("a", _A, grammar="3"))
    return bench


def _queued(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy, max_running=1)
    bench.turn(bench.submit("b", _A))
    bench.turn(bench.submit("a", _A))
    return bench


def _sibling(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy)
    bench.turn(bench.submit("a", _A, choices=2))
    return bench


def _preempted(cause: Cause, policy: str) -> Bench:
    """B needs a block, a transfer has one of four, and A is the youngest."""
    bench = Bench(cause, policy, blocks=4, stages=1, window=1)
    bench.turn(bench.submit("b", (9, 2, 3, 4), 3), bench.submit("a", (5, 6, 7, 8), 3))
    _load(bench)
    bench.turn(*bench.step())
    return bench


def _stale(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy, blocks=4)
    bench.turn(bench.submit("b", (9, 2, 3, 4), 3))
    bench.turn(bench.submit("a", (5, 6, 7, 8, 9), 3))
    _load(bench)
    bench.turn(*bench.step())
    return bench


def _load(bench: Bench) -> None:
    got = bench.group.begin_load([1, 1, 1, 1])
    assert got is not None
    for rank in bench.group.ranks[1:]:
        bench.group.deliver(rank, got[1])


def _prefilling(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy, max_batch_tokens=8)
    bench.turn(bench.submit("a", _A))
    return bench


def _between(cause: Cause, policy: str) -> Bench:
    bench = _prefilling(cause, policy)
    bench.late = bench.step()
    return bench


def _decoding(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy)
    bench.turn(bench.submit("a", _A))
    while not bench.group.planner.schedule.decoding:
        bench.turn()
        bench.turn(*bench.step())
    return bench


def _idle(cause: Cause, policy: str) -> Bench:
    bench = _decoding(cause, policy)
    bench.late = bench.step()
    return bench


def _draft(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy, vocab=3, draft_tokens=2, max_batch_tokens=64)
    bench.turn(bench.submit("a", _ALL_TRIPLES))
    bench.turn(*bench.step())
    return bench


def _overlapped(cause: Cause, policy: str) -> Bench:
    bench = Bench(cause, policy, stages=1, window=2)
    bench.turn(bench.submit("a", _A))
    bench.turn(*bench.step())
    bench.turn()
    return bench


def shared(cause: Cause, policy: str) -> Bench:
    """Two choices decode, and hold the blocks of their prompt together."""
    bench = _sibling(cause, policy)
    while len(bench.group.planner.schedule.decoding) < 2:
        bench.turn()
        bench.turn(*bench.step())
    return bench


SETUPS: dict[Place, Callable[[Cause, str], Bench]] = {
    Place.COMPILING: _compiling,
    Place.QUEUED: _queued,
    Place.SIBLING: _sibling,
    Place.PREEMPTED: _preempted,
    Place.STALE: _stale,
    Place.BETWEEN: _between,
    Place.PREFILLING: _prefilling,
    Place.IDLE: _idle,
    Place.DECODING: _decoding,
    Place.DRAFT: _draft,
    Place.OVERLAPPED: _overlapped,
}


# --- what then happens -----------------------------------------------------------------------


def measure(place: Place, cause: Cause, policy: str = "native") -> Measured | None:
    """Bring a request to a place and end it there.

    ``None`` when this policy never has it there, or when the cause does not apply any more (a
    deadline that has been met).
    """
    bench = SETUPS[place](cause, policy)
    choice = bench.group.planner.requests.live("a")[-1]
    if not bench.late and place_of(bench.group.planner, choice) is not place:
        return None
    return run(bench, cause)


def run(bench: Bench, cause: Cause) -> Measured | None:
    """End ``a``, or the last choice of it, as it stands."""
    planner = bench.group.planner
    choice = planner.requests.live("a")[-1]  # of two, the one that waits for the other
    signal = _signal(bench, cause, choice.uid)
    events = [*bench.late, *signal]
    turns = steps = delivered = 0
    while True:
        rid = choice.rid if choice.seq is not None else 0
        planned = bench.turn(*events)
        require(planned is not None or bool(planner.replica.in_flight), f"{cause} hangs")
        if planned is not None:
            outputs = planned.outputs
            # What a result of its own turn brought was there before the cause.
            delivered += sum(key == choice.key for key in outputs.keys) if turns else 0
            reasons = [ended.reason for ended in outputs.ended if ended.key == choice.key]
            if reasons:
                break
            turns += 1
        events = [] if planned is not None else bench.step()
        steps += planned is None
    if reasons[0] in _FINISHED:
        return None
    last = max(
        (
            s
            for s, f in planner.replica.in_flight.items()
            if any(seq.rid == rid for seq, _, _ in f.rows)
        ),
        default=0,
    )
    receipt = bench.group.receipts.get("s")
    pending = [] if receipt is None else bench.group.receipts.pending_on(receipt)
    return Measured(
        turns,
        steps,
        delivered,
        sum(step <= last for step in planner.replica.in_flight),
        bench.dropped.get(rid, Dropped()),
        tuple(dict.fromkeys(what.split(": ")[1].split(" ")[0] for what in pending)),
    )


def _signal(bench: Bench, cause: Cause, uid: str) -> list[Event]:
    if cause in _LIMITS:
        bench.now += LATE
        return []
    if cause is Cause.LEASE:
        return [LeaseLost("a")]
    if cause is Cause.DRAIN:
        return [DrainStarted(bench.now)]
    if cause is Cause.ABORT:
        return [ModeChanged(Mode.ABORTED)]
    target = Target(uids=(uid,)) if cause is Cause.UID else Target(conversation="a")
    return [StopSignal(Stop("s", target, Reason.CLIENT_CANCEL, "t", False, START))]
