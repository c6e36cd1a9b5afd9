"""A leader and one follower in a test's hand: events in, turns out, both replicas compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stopway_core.config import PlannerConfig
from stopway_core.events import Completed, Event, StopSignal, Submit
from stopway_core.planner import Planned, Planner
from stopway_core.policies import POLICIES
from stopway_core.policy import Policy
from stopway_core.receipts import RankInfo, ReceiptBook
from stopway_core.replica import Replica
from stopway_core.turn import decode_turn, encode_turn
from stopway_core.types import (
    Deadlines,
    Reason,
    SamplingParams,
    StepResult,
    Stop,
    Submission,
    Target,
)
from stopway_core.wire import Decoder


class Rig:
    """The planner with a replica that composes and one that follows through bytes."""

    EOS = 0

    def __init__(
        self,
        *,
        blocks: int = 16,
        size: int = 4,
        ranks: int = 1,
        grammars: int = 4,
        policy: str | Policy = "native",
        **config: object,
    ) -> None:
        config.setdefault("max_model_len", 1000)
        config.setdefault("eos_ids", frozenset({self.EOS}))
        self.now = 1000.0
        config["policy"] = POLICIES[policy] if isinstance(policy, str) else policy
        self.replica = Replica(blocks, size, grammars=grammars)
        self.follower = Replica(blocks, size, grammars=grammars)
        infos = [RankInfo(rank, 0, f"n{rank}") for rank in range(ranks)]
        self.receipts = ReceiptBook("g", 1, infos)
        self.planner = Planner(PlannerConfig(**config), self.replica, self.receipts)

    def maybe(self, *events: Event) -> Planned | None:
        """Take a turn that may come to nothing."""
        planned = self.planner.turn(self.now, list(events))
        if planned is not None:
            (frame,) = Decoder().feed(encode_turn(planned.turn, 1))
            applied = self.follower.apply(decode_turn(frame))
            assert self.follower.digest == self.replica.digest
            assert applied.stops == planned.stops
            self.follower.check()
        self.replica.check()
        return planned

    def turn(self, *events: Event) -> Planned:
        """Take a turn that must come to something."""
        planned = self.maybe(*events)
        assert planned is not None
        return planned

    def result(self, *tokens: int, skip: int = 0) -> Completed:
        """The result of a step in flight (the oldest but ``skip``); 7 for each row by default."""
        step = list(self.replica.in_flight)[skip]
        rows = sum(samples > 0 for _, _, samples in self.replica.in_flight[step].rows)
        return Completed(StepResult(step, list(tokens) or [7] * rows))

    def rows(self, *rows: list[int], skip: int = 0) -> Completed:
        """The same with the tokens of each row."""
        step = list(self.replica.in_flight)[skip]
        tokens = [token for row in rows for token in row]
        return Completed(StepResult(step, tokens, counts=[len(row) for row in rows]))

    def run(self, token: int = 7, turns: int = 500) -> list[Planned]:
        """Complete steps until nothing is in flight; returns the turns."""
        made = []
        while self.replica.in_flight:
            made.append(self.turn(self.result(*[token] * self._rows())))
            assert len(made) < turns
        return made

    def _rows(self) -> int:
        step = next(iter(self.replica.in_flight))
        return sum(samples > 0 for _, _, samples in self.replica.in_flight[step].rows)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(free, cached, held) blocks."""
        pool = self.replica.ledger.blocks
        return pool.free, pool.idle, pool.held

    @staticmethod
    def submit(
        uid: str, prompt: object = 4, *, deadlines: Deadlines | None = None, **kw: object
    ) -> Submit:
        """A submission; ``prompt`` is its tokens or their number."""
        tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)  # type: ignore[call-overload]
        names = SamplingParams.__dataclass_fields__
        params = SamplingParams(**{k: kw.pop(k) for k in list(kw) if k in names})
        kw.setdefault("tenant", "t")
        kw.setdefault("minted_at", 1000.0)
        return Submit(
            Submission(
                uid, 1, prompt=tokens, params=params, deadlines=deadlines or Deadlines(), **kw
            )
        )

    @staticmethod
    def stop(
        stop_id: str,
        *uids: str,
        target: Target | None = None,
        tenant: str = "t",
        admin: bool = False,
        reason: Reason = Reason.CLIENT_CANCEL,
        publisher: str = "",
    ) -> StopSignal:
        """A stop of ``uids``, or of ``target``."""
        aim = target or Target(uids=uids)
        trace = f"tp-{stop_id}"
        return StopSignal(Stop(stop_id, aim, reason, tenant, admin, 1000.0, trace, publisher))


@pytest.fixture
def rig() -> Callable[..., Rig]:
    """Makes a ``Rig``."""
    return Rig
