"""Every interleaving of a tiny case: one or two ranks, two requests, one stop.

At each point one of the things that can happen does: a request reaches the leader, the stop does,
the leader takes a turn with what has come, a follower gets its next frame, a rank runs a step, a
result arrives, a grammar has been compiled. All orders are tried; two that lead to the same state
are followed once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stopway_core.config import PlannerConfig
from stopway_core.events import Completed, Event, StopSignal, Submit
from stopway_core.names import child_uid
from stopway_core.types import Reason, SamplingParams, Stop, Submission, Target
from stopway_sim.choices import Exhaustive
from stopway_sim.failure import SimFailure, require
from stopway_sim.group import Group, GroupShape
from stopway_sim.truth import SoloRuns, Truth

NOW = 1_000.0
STEPS_MAX = 400
Fingerprint = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny world: what reaches the leader, in any order."""

    shape: GroupShape
    window: int
    prompts: tuple[tuple[int, ...], ...]
    stop_of: int  # index of the request that the stop names: its last choice, if there are several
    max_tokens: int = 2
    batch_tokens: int = 2
    draft_tokens: int = 0
    choices: int = 1
    grammar: str = ""

    def events(self) -> list[Event]:
        """The submissions, then the stop."""
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True)
        events: list[Event] = [
            Submit(
                Submission(
                    f"r{index}",
                    1,
                    "t",
                    prompt,
                    params,
                    NOW,
                    choices=self.choices,
                    grammar=self.grammar,
                )
            )
            for index, prompt in enumerate(self.prompts)
        ]
        uid = f"r{self.stop_of}"
        target = Target(uids=(child_uid(uid, self.choices - 1) if self.choices > 1 else uid,))
        events.append(StopSignal(Stop("s", target, Reason.CLIENT_CANCEL, "t", False, NOW)))
        return events


@dataclass(slots=True)
class Explored:
    """What an exploration met."""

    runs: int = 0
    states: int = 0
    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)


def explore(case: Case) -> Explored:
    """Follow every order. Raises ``SimFailure`` with the choices that lead to a failure."""
    found = Explored()
    seen: set[Fingerprint] = set()
    chooser = Exhaustive()
    solos = SoloRuns(case.shape)
    while chooser.next():
        found.runs += 1
        try:
            _Run(case, chooser, solos, seen, found).go()
        except Exception as error:
            raise SimFailure(
                f"{case}: the choices {chooser.path} lead to {type(error).__name__}: {error}"
            ) from error
    found.states = len(seen)
    return found


class _Run:
    def __init__(
        self,
        case: Case,
        chooser: Exhaustive,
        solos: SoloRuns,
        seen: set[Fingerprint],
        found: Explored,
    ) -> None:
        config = PlannerConfig(
            max_model_len=case.shape.blocks * case.shape.block_size,
            max_batch_tokens=case.batch_tokens * case.shape.pipeline,
            stages=case.shape.pipeline,
            window=case.window,
            draft_tokens=case.draft_tokens,
        )
        self.case = case
        self.chooser, self.seen, self.found = chooser, seen, found
        self.group = Group(case.shape, config)
        self.truth = Truth(self.group, solos, found.coverage)
        self.coming = case.events()
        self.inbox: list[Event] = []
        self.launchable = False  # whether a turn without news may have something to launch
        self.links: list[deque[bytes]] = [deque() for _ in self.group.ranks]
        self.reports: deque[Event] = deque()  # on their way from the sampling rank

    def go(self) -> None:
        for _ in range(STEPS_MAX):
            actions = self._enabled()
            if not actions:
                return self._finish()
            self.group.checking = self.chooser.fresh
            if self.chooser.fresh:
                state = self._fingerprint()
                if state in self.seen:
                    return None
                self.seen.add(state)
            actions[self.chooser.below(len(actions)) if len(actions) > 1 else 0]()
        raise SimFailure("this run never comes to rest")

    def _enabled(self) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        actions += [lambda e=event: self._come(e) for event in self.coming]  # type: ignore[misc]
        if self.inbox or self.launchable:
            actions.append(self._lead)
        for rank in self.group.ranks:
            if self.links[rank.rank]:
                actions.append(lambda r=rank.rank: self._deliver(r))  # type: ignore[misc]
            if self.group.executable(rank):
                actions.append(lambda r=rank.rank: self._execute(r))  # type: ignore[misc]
        if self.group.sampling_rank.compiling:
            actions.append(self._compile)
        if self.reports:
            actions.append(self._report)
        return actions

    def _come(self, event: Event) -> None:
        self.coming.remove(event)
        self.inbox.append(event)

    def _lead(self) -> None:
        for event in self.inbox:
            if isinstance(event, Submit):
                self.truth.submitted(event.submission)
        events, self.inbox = self.inbox, []
        self.truth.before_turn(events)
        got = self.group.turn(NOW, events)
        self.launchable = got is not None
        if got is None:
            return
        planned, frame = got
        self.truth.after_turn(planned, NOW)
        for link in self.links[1:]:
            link.append(frame)
        self._progress(0)

    def _deliver(self, rank: int) -> None:
        self.group.deliver(self.group.ranks[rank], self.links[rank].popleft())
        self._progress(rank)

    def _execute(self, rank: int) -> None:
        result = self.group.execute(self.group.ranks[rank])
        if result is not None:
            self.reports.append(Completed(result))
        self._progress(rank)

    def _compile(self) -> None:
        report = self.group.compile_next()
        assert report is not None
        self.reports.append(report)

    def _report(self) -> None:
        self.inbox.append(self.reports.popleft())

    def _progress(self, index: int) -> None:
        rank, receipts = self.group.ranks[index], self.group.receipts
        receipts.progress(index, rank.replica.turn, NOW, rank.executed, NOW)
        for receipt in receipts.changed():
            self.truth.receipt(receipt)

    def _fingerprint(self) -> Fingerprint:
        """All that decides what can follow: the log says what the planner and replicas are."""
        return (
            tuple(self.group.log),
            tuple(type(e).__name__ + str(getattr(e, "submission", "")) for e in self.coming),
            tuple(repr(e) for e in self.inbox),
            self.launchable,
            tuple(len(link) for link in self.links),
            tuple(rank.executed for rank in self.group.ranks),
            tuple(type(report).__name__ for report in self.reports),
            len(self.group.sampling_rank.compiling),
        )

    def _finish(self) -> None:
        self.truth.finish()
        wanted = len(self.case.prompts) * self.case.choices
        require(len(self.truth.by_key) == wanted, "a request got lost")
        require(self.truth.status.keys() == {"s"}, "the stop got lost")
        ends = [w.ended for w in self.truth.by_key.values()]
        by_uid = sorted((e.uid, e.reason.value, e.keep) for e in ends if e is not None)
        self.found.outcomes[tuple(f"{u} {r} {k}" for u, r, k in by_uid)] += 1
        for (place, cause), times in self.group.planner.met.items():
            self.found.coverage[f"{place} x {cause}"] += times
