"""What a turn costs: the real planner and a follower's replica, without a model.

The budget of the design is under 1 ms with 256 running and 10,000 waiting requests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stopway_cli.bench.figures import spread
from stopway_core.config import PlannerConfig
from stopway_core.events import Completed, Event, StopSignal, Submit
from stopway_core.names import BLOCK_SIZE
from stopway_core.planner import Planned, Planner
from stopway_core.receipts import RankInfo, ReceiptBook
from stopway_core.replica import Replica
from stopway_core.turn import decode_turn, encode_turn
from stopway_core.types import (
    Reason,
    SamplingParams,
    StepResult,
    Stop,
    Submission,
    Target,
)
from stopway_core.wire import Decoder

EPOCH = 1
PROMPT_TOKENS = 64
BLOCKS = 16_384
MAX_LEN = 4096


@dataclass
class Cost:
    """Milliseconds of each turn: at the leader, and at a follower with its frame's decoding."""

    planner_ms: list[float] = field(default_factory=list)
    follower_ms: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "planner_ms": spread(self.planner_ms).to_json(),
            "follower_ms": spread(self.follower_ms).to_json(),
        }


class World:
    """A leader with full house and long queue, and one follower."""

    def __init__(self, running: int, waiting: int) -> None:
        self.running, self.waiting = running, waiting
        self.planner = Planner(
            PlannerConfig(
                max_model_len=MAX_LEN,
                max_running=running,
                max_waiting=waiting + running + 1,
                max_batch_tokens=2048,
            ),
            Replica(BLOCKS, BLOCK_SIZE),
            ReceiptBook("bench", EPOCH, [RankInfo(rank, 0, "local") for rank in range(2)]),
        )
        self.follower = Replica(BLOCKS, BLOCK_SIZE)
        self.now = 1000.0
        self.submitted = 0
        self._result: list[Event] = []

    def submit(self, count: int) -> list[Event]:
        """``count`` new requests that would run nearly for ever."""
        events: list[Event] = []
        for _ in range(count):
            number = self.submitted
            self.submitted += 1
            prompt = tuple((number * 7919 + i * 31) % 49_000 for i in range(PROMPT_TOKENS))
            params = SamplingParams(max_tokens=MAX_LEN - PROMPT_TOKENS, ignore_eos=True)
            uid = f"req-{number:x}-bench-0"
            events.append(Submit(Submission(uid, 1, "bench", prompt, params, minted_at=self.now)))
        return events

    def turn(self, events: list[Event], cost: Cost | None = None) -> None:
        """One turn of the leader and of the follower; its step is done before the next."""
        self.now += 0.01
        mine = [*self._result, *events]
        self._result = []
        begun = time.perf_counter()
        planned = self.planner.turn(self.now, mine)
        planner_ms = (time.perf_counter() - begun) * 1000
        if planned is None:
            return
        frame = encode_turn(planned.turn, EPOCH)
        follower_ms = _milliseconds(lambda: self._follow(frame))
        if cost is not None:
            cost.planner_ms.append(planner_ms)
            cost.follower_ms.append(follower_ms)
        self._complete(planned)

    def _follow(self, frame: bytes) -> None:
        decoder = Decoder()
        for message in decoder.feed(frame):
            self.follower.apply(decode_turn(message))

    def _complete(self, planned: Planned) -> None:
        if planned.work is not None:
            sampled = sum(row.samples for row in planned.work.rows)
            tokens = [(self.now_int + i) % 49_000 for i in range(sampled)]
            self._result = [Completed(StepResult(planned.work.step, tokens))]

    @property
    def now_int(self) -> int:
        return int(self.now * 100)

    def fill(self) -> None:
        """Until all of ``running`` decode and ``waiting`` wait."""
        self.turn(self.submit(self.running + self.waiting))
        for _ in range(1000):
            if self.planner.running == self.running and self.planner.waiting == self.waiting:
                break
            self.turn([])
        for _ in range(8):
            self.turn([])


def measure(running: int = 256, waiting: int = 10_000, turns: int = 400) -> dict[str, Any]:
    """Cost of a plain decoding turn, and of one in which a request is stopped and one comes."""
    world = World(running, waiting)
    world.fill()
    gc.collect()
    gc.freeze()
    decoding, churning = Cost(), Cost()
    try:
        for _ in range(turns):
            world.turn([], decoding)
        for number in range(min(turns, world.submitted)):
            stop = Stop(
                stop_id=f"stop-{number}",
                target=Target(uids=(f"req-{number:x}-bench-0",)),
                reason=Reason.CLIENT_CANCEL,
                tenant="bench",
                admin=False,
                issued_at=world.now,
            )
            world.turn([StopSignal(stop), *world.submit(1)], churning)
    finally:
        gc.unfreeze()
    return {
        "running": running,
        "waiting": waiting,
        "decode": decoding.to_json(),
        "stop_and_submit": churning.to_json(),
    }


def _milliseconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1000
