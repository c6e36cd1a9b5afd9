"""A follower's control loop: it applies turns, runs steps, and reports. It decides nothing."""

from __future__ import annotations

import time
from typing import Any

from stopway_core.replica import Replica, ReplicaError
from stopway_core.turn import decode_turn
from stopway_core.types import Logprobs, StepResult
from stopway_core.wire import Frame, FrameKind, WireError, encode
from stopway_engine.config import PodConfig
from stopway_engine.control.loop import ControlLoop, EpochEnded
from stopway_engine.exec_thread import Done, ExecThread
from stopway_engine.grammar.compiler import GrammarCompiler
from stopway_engine.link import Link, LinkClosed


class Follower(ControlLoop):
    """Every rank but rank 0, after WELCOME."""

    def __init__(
        self,
        config: PodConfig,
        rank: int,
        epoch: int,
        num_blocks: int,
        pod: Link,
        leader: Link,
        exec_thread: ExecThread,
        compiler: GrammarCompiler | None,
    ) -> None:
        super().__init__(config, rank, epoch, pod, exec_thread, compiler)
        self.replica = Replica(num_blocks, config.block_size, grammars=config.grammars)
        self.leader = leader
        leader.heard_at = time.monotonic()
        leader.register(self.selector)
        self._applied_at = 0.0
        self._executed_at = 0.0
        self._final = False

    @property
    def state(self) -> str:
        return "ready" if self.ready else "loading"

    def on_frame(self, link: Link, frame: Frame) -> None:
        if frame.epoch != self.epoch:
            raise EpochEnded(f"a frame of epoch {frame.epoch} came in epoch {self.epoch}")
        if frame.kind is FrameKind.TURN:
            self._on_turn(frame)
        elif frame.kind is FrameKind.FINAL:
            self._final = True
            self._send(FrameKind.BYE, None)
            self.leader.drain(1.0)
            self.close()
        elif frame.kind is not FrameKind.KEEPALIVE:
            raise EpochEnded(f"the leader sent {frame.kind.name}")

    def _on_turn(self, frame: Frame) -> None:
        try:
            turn = decode_turn(frame)
            applied = self.replica.apply(turn)
        except (WireError, ReplicaError) as error:
            raise EpochEnded(str(error)) from None
        self.run_turn(turn, applied.work)
        now = self._applied_at = time.time()
        if applied.stops:
            self.stops_applied(applied.stops, turn.number, now)
            notices = [
                [stop.stop_id, *self.stops.first_notice(stop.stop_id)] for stop in applied.stops
            ]
            self._progress(notices)

    def on_done(self, done: Done) -> None:
        self._executed_at = done.at
        if done.result is not None:
            self._send(FrameKind.RESULT, *_result_frame(done.result))
        self._progress([])

    def _progress(self, noticed: list[Any]) -> None:
        self._send(
            FrameKind.PROGRESS,
            {
                "ready": self.ready,
                "applied": self.replica.turn,
                "applied_at": self._applied_at,
                "executed": self.executed,
                "executed_at": self._executed_at,
                "noticed": noticed,
            },
        )

    def on_ready(self) -> None:
        self._progress([])

    def on_compiled(self, reports: list[tuple[int, str]]) -> None:
        self._send(FrameKind.REPORT, {"compiled": reports})

    def on_notice(self, entry: dict[str, Any], now: float) -> None:
        """Off-queue only: it is recorded, and comes into effect at its turn."""

    def on_overdue(self, entries: list[Any]) -> None:
        self._send(FrameKind.REPORT, {"stops": entries})

    def on_drain(self) -> None:
        if self._final:
            return  # it leaves already, and the leader may have gone
        if not self.ready:
            raise EpochEnded("told to drain before it was loaded")
        self._send(FrameKind.REPORT, {"drain": True})

    def on_beat(self, mono: float) -> None:
        self.check_heard(self.leader, mono, "the leader")
        self._progress([])

    def on_closed(self, link: Link, why: str) -> None:
        if not self._final:
            raise EpochEnded(why)

    def _send(self, kind: FrameKind, body: Any, arrays: list[list[int]] | None = None) -> None:
        frame = encode(kind, body, arrays or [], epoch=self.epoch, turn=self.replica.turn)
        try:
            self.leader.send(frame)
        except LinkClosed as closed:
            raise EpochEnded(str(closed)) from None


def _result_frame(result: StepResult) -> tuple[dict[str, Any], list[list[int]]]:
    body: dict[str, Any] = {"step": result.step}
    if any(result.logprobs):
        body["logprobs"] = [item and item.to_json() for item in result.logprobs]
    return body, [result.tokens, result.counts] if result.counts else [result.tokens]


def result_of(frame: Frame) -> StepResult:
    """The result in a RESULT frame. Raises ``EpochEnded`` when it cannot be read."""
    try:
        logprobs = [
            None if item is None else Logprobs(item[0], [(t, p) for t, p in item[1]])
            for item in frame.body.get("logprobs", ())
        ]
        tokens, *counts = (array.tolist() for array in frame.arrays)
        return StepResult(frame.body["step"], tokens, logprobs, counts[0] if counts else [])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EpochEnded(f"a result that cannot be read: {error!r}") from None
