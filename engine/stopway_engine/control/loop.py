"""What the control loops of the leader and of a follower have in common.

One thread, one selector: links, the exec thread's wake, timers. It owns the replica. It never
waits for one named thing, and it ends the process when a peer, a step or the exec thread is lost:
a rank process serves one epoch.
"""

from __future__ import annotations

import selectors
import sys
import time
from typing import Any

from stopway_core.replica import Replica, StopApplied
from stopway_core.topology import stage_of
from stopway_core.turn import Turn
from stopway_core.types import StepWork
from stopway_core.wire import Frame, FrameKind, encode
from stopway_engine.config import PodConfig
from stopway_engine.control.stops import RankStops
from stopway_engine.exec_thread import Done, ExecThread, Failed
from stopway_engine.grammar.compiler import CompilerError, GrammarCompiler
from stopway_engine.link import Link, LinkClosed
from stopway_engine.trace import Span


class EpochEnded(Exception):
    """This epoch is over: leave at once. The message says why."""


class ControlLoop:
    """A rank's loop; ``run`` returns when the group has drained and raises ``EpochEnded`` else."""

    def __init__(
        self,
        config: PodConfig,
        rank: int,
        epoch: int,
        pod: Link,
        exec_thread: ExecThread,
        compiler: GrammarCompiler | None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.epoch = epoch
        self.pod = pod
        self.exec = exec_thread
        self._compiler = compiler  # on the rank that samples
        self.replica: Replica
        self.executed = 0
        self.ready = False
        self.stops = RankStops(
            {
                "stopway.rank": rank,
                "stopway.stage": stage_of(rank, config.tensor),
                "stopway.node": config.node,
                "stopway.group": config.group,
                "stopway.epoch": epoch,
            }
        )
        self._spans: list[Span] = []
        self._beat_every = max(0.05, config.peer_loss_s / 10)
        self._beat_at = time.monotonic()
        self._stood_still_s = 0.0  # by which the latest beat came too late
        self._told = ""  # the state that ``supervise`` was last told
        self._closing = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(exec_thread.fileno(), selectors.EVENT_READ, exec_thread)
        if compiler is not None:
            self.selector.register(compiler.fileno(), selectors.EVENT_READ, compiler)
        pod.register(self.selector)

    # --- the loop ------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the epoch. Raises ``EpochEnded`` when it breaks."""
        while not self._closing:
            timeout = self._timeout(time.monotonic())
            for key, mask in self.selector.select(timeout):
                source = key.data
                if source is self.exec:
                    self._on_exec()
                elif isinstance(source, GrammarCompiler):
                    self._on_compiler(source)
                else:
                    if mask & selectors.EVENT_WRITE:
                        self._flush(source)
                    if mask & selectors.EVENT_READ:
                        self._read(source)
            self._tick(time.monotonic())
            self._send_spans()

    def _timeout(self, mono: float) -> float:
        timers = [self._beat_at, self.stops.next_timer(), *self._timers(mono)]
        return max(0.0, min(t for t in timers if t is not None) - mono)

    def _timers(self, mono: float) -> list[float | None]:
        return []

    def _read(self, link: Link) -> None:
        if link.closed:  # by what came with it in the same pass
            return
        try:
            for frame in link.frames(time.monotonic()):
                if link is self.pod:
                    self._on_pod(frame)
                else:
                    self.on_frame(link, frame)
        except LinkClosed as closed:
            self.on_closed(link, str(closed))

    def _flush(self, link: Link) -> None:
        if link.closed:
            return
        try:
            link.flush()
        except LinkClosed as closed:
            self.on_closed(link, str(closed))

    def _on_exec(self) -> None:
        for done in self.exec.take():
            if isinstance(done, Failed):
                raise EpochEnded(f"rank {self.rank} failed: {done.message}")
            self.executed = done.step
            self._spans += self.stops.executed(done.step, done.at)
            self.on_done(done)
        if self.exec.ready and not self.ready:
            self.ready = True
            self.on_ready()

    def _on_compiler(self, compiler: GrammarCompiler) -> None:
        try:
            reports = compiler.take()
        except CompilerError as error:
            raise EpochEnded(f"rank {self.rank} failed: {error}") from None
        self.on_compiled(reports)

    def _on_pod(self, frame: Frame) -> None:
        body = frame.body
        if "notice" in body:
            entry = body["notice"]
            now = time.time()
            made = self.stops.notice(
                entry, body["read_at"], now, time.monotonic(), self.replica.turn
            )
            if made is not None:
                self._spans.append(made)
            self.on_notice(entry, now)
        elif "drain" in body:
            self.on_drain()

    def run_turn(self, turn: Turn, work: StepWork | None) -> None:
        """Start what a turn wants of this rank's exec queue, and of what runs beside it."""
        if self._compiler is not None:
            for slot in turn.forgets:
                self._compiler.forget(slot)
            for compile in turn.compiles:
                self._compiler.compile(compile.slot, compile.text)
        if work is not None:
            self.exec.submit(work)

    def stops_applied(self, stops: list[StopApplied], turn: int, now: float) -> None:
        """Record what a turn's stops did on this rank, and trace those that wait for no step."""
        for stop in stops:
            self._spans += self.stops.applied(stop, turn, now)
        if stops:
            self._spans += self.stops.executed(self.executed, now)

    def _tick(self, mono: float) -> None:
        started = self.exec.started_at
        if started is not None and mono - started > self.config.step_timeout_s:
            raise EpochEnded(
                f"rank {self.rank}: a step has run for {mono - started:.0f} s, longer than "
                f"step_timeout_s = {self.config.step_timeout_s:g}"
            )
        beat = mono >= self._beat_at
        if beat or self.state != self._told:
            self._told = self.state
            self.tell_pod({"state": self._told, "epoch": self.epoch})
        if beat:
            late_s = mono - self._beat_at
            self._stood_still_s = late_s if late_s > self._beat_every else 0.0
            self._beat_at = mono + self._beat_every
            self.on_beat(mono)
        overdue = self.stops.overdue(mono)
        if overdue:
            self.on_overdue(overdue)
        self.on_tick(mono)

    def check_heard(self, link: Link, mono: float, who: str) -> None:
        """Raise ``EpochEnded`` when ``link`` has been silent for too long, at a beat.

        The time in which this process stood still, or the whole machine, does not count: nobody
        listened, and what was said then may still be unread.
        """
        link.heard_at = min(mono, link.heard_at + self._stood_still_s)
        if mono - link.heard_at > self.config.peer_loss_s:
            raise EpochEnded(f"{who} has been silent for {mono - link.heard_at:.1f} s")

    def tell_pod(self, body: dict[str, Any]) -> None:
        """Send a record to ``supervise``; a pod that is gone takes this process with it."""
        try:
            self.pod.send(encode(FrameKind.POD_OUT, body, epoch=self.epoch))
        except LinkClosed:
            raise EpochEnded("the pod's supervise is gone") from None

    def add_spans(self, spans: list[Span]) -> None:
        self._spans += spans

    def _send_spans(self) -> None:
        if self._spans:
            spans, self._spans = self._spans, []
            self.tell_pod({"spans": spans})

    def close(self) -> None:
        """Leave the loop after this pass."""
        self._closing = True

    @staticmethod
    def log(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    # --- what differs --------------------------------------------------------------------

    @property
    def state(self) -> str:
        raise NotImplementedError

    def on_frame(self, link: Link, frame: Frame) -> None:
        raise NotImplementedError

    def on_closed(self, link: Link, why: str) -> None:
        raise EpochEnded(why)

    def on_done(self, done: Done) -> None:
        raise NotImplementedError

    def on_ready(self) -> None:
        raise NotImplementedError

    def on_compiled(self, reports: list[tuple[int, str]]) -> None:
        raise NotImplementedError

    def on_notice(self, entry: dict[str, Any], now: float) -> None:
        raise NotImplementedError

    def on_overdue(self, entries: list[Any]) -> None:
        raise NotImplementedError

    def on_drain(self) -> None:
        """This pod is to end. Raises ``EpochEnded`` when the group serves nothing to drain."""
        raise NotImplementedError

    def on_beat(self, mono: float) -> None:
        raise NotImplementedError

    def on_tick(self, mono: float) -> None:
        """Called once after every pass."""
