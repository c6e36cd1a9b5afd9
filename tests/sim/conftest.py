"""A simulated group in a test's hand: events in, frames held or delivered, steps run or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stopway_core.config import PlannerConfig
from stopway_core.events import Event, StopSignal, Submit
from stopway_core.planner import Planned
from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines, Reason, SamplingParams, Stop, Submission, Target
from stopway_sim import Group, GroupShape
from stopway_sim.group import Load
from stopway_sim.places import Place, place_of
from stopway_sim.truth import SoloRuns, Truth, Watched


class Stack:
    """One epoch, without time but for ``now``; every turn is checked."""

    def __init__(
        self,
        *,
        tensor: int = 1,
        pipeline: int = 2,
        blocks: int = 16,
        size: int = 4,
        model_len: int = 1000,
        vocab: int = 97,
        grammars: int = 4,
        policy: str = "native",
        **config: int,
    ) -> None:
        shape = GroupShape(tensor, pipeline, blocks, size, vocab=vocab, grammars=grammars)
        self.now = 1000.0
        limits = PlannerConfig(
            max_model_len=model_len, stages=pipeline, policy=POLICIES[policy], **config
        )
        self.group = Group(shape, limits)
        self.solos = SoloRuns(shape)
        self.truth = Truth(self.group, self.solos, Counter())
        self.held: list[bytes] | None = None  # frames that the followers have yet to get
        self.load: Load | None = None
        self.preempting: Planned | None = None

    def turn(self, *events: Event) -> Planned:
        """A turn that must come to something; followers get it unless frames are held."""
        for event in events:
            if isinstance(event, Submit):
                self.truth.submitted(event.submission)
        self.truth.before_turn(events)
        got = self.group.turn(self.now, list(events))
        assert got is not None
        self.truth.after_turn(got[0], self.now)
        if self.held is None:
            self.follow(got[1])
        else:
            self.held.append(got[1])
        return got[0]

    def follow(self, *frames: bytes) -> list[object]:
        """Deliver frames to every follower; returns what they applied."""
        applied = []
        for frame in frames:
            for rank in self.group.ranks[1:]:
                applied += [a for _, a in self.group.deliver(rank, frame).turns]
        return applied

    def steps(self) -> list[Event]:
        """Run what can run; the results."""
        return self.group.run_steps()

    def advance(self) -> list[Planned]:
        """Run the oldest step alone, then take turns until none comes to anything."""
        made = [self.turn(self.group.run_oldest())]
        return made + self.settle()

    def settle(self) -> list[Planned]:
        """Take turns until none comes to anything."""
        made = []
        while True:
            self.truth.before_turn()
            got = self.group.turn(self.now, [])
            if got is None:
                return made
            self.truth.after_turn(got[0], self.now)
            self.follow(got[1])
            made.append(got[0])

    def finish(self) -> list[Planned]:
        """Run everything to its end, then check that all is free."""
        made = []
        while results := self.steps():
            made.append(self.turn(*results))
            made += self.settle()
        for rank in self.group.ranks:
            turn, executed = rank.replica.turn, rank.executed
            self.group.receipts.progress(rank.rank, turn, self.now, executed, self.now)
        for receipt in self.group.receipts.changed():
            self.truth.receipt(receipt)
        self.truth.finish()
        return made

    def of(self, uid: str, index: int = 0) -> Watched:
        """What came of one choice."""
        return self.truth.by_key[self.truth.keys[uid][index]]

    def ended(self, uid: str, index: int = 0) -> tuple[str, int]:
        """(reason, tokens kept) of one choice."""
        ended = self.of(uid, index).ended
        assert ended is not None
        return ended.reason.value, ended.keep

    def solo(self, prompt: tuple[int, ...], count: int, grammar: str = "") -> list[int]:
        """The first tokens of the undisturbed greedy run."""
        return self.solos.of(prompt, grammar).output(count)

    @property
    def place(self) -> Callable[[str], Place]:
        """Where the first living choice of a request is."""
        planner = self.group.planner
        return lambda uid: place_of(planner, planner.requests.live(uid)[0])

    @property
    def counts(self) -> tuple[int, int, int]:
        """(free, cached, held) blocks of the leader."""
        pool = self.group.ranks[0].replica.ledger.blocks
        return pool.free, pool.idle, pool.held

    def submit(
        self,
        uid: str,
        prompt: tuple[int, ...],
        max_tokens: int = 4,
        *,
        deadlines: Deadlines | None = None,
        **more: Any,
    ) -> Submit:
        """A greedy request that ends by its length only, or by its grammar."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        limits = deadlines or Deadlines()
        return Submit(Submission(uid, 1, "t", prompt, params, 1000.0, deadlines=limits, **more))

    def stop(self, stop_id: str, *uids: str, target: Target | None = None) -> StopSignal:
        """A client's cancel of ``uids``, or of ``target``."""
        aim = target or Target(uids=uids)
        return StopSignal(Stop(stop_id, aim, Reason.CLIENT_CANCEL, "t", False, 1000.0))


@pytest.fixture
def stack() -> Callable[..., Stack]:
    """Makes a ``Stack``."""
    return Stack
