"""Rank 0's control loop: it feeds the planner with what happens and sends out its turns."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from stopway_core import names
from stopway_core.config import PlannerConfig
from stopway_core.events import (
    Compiled,
    Completed,
    DrainStarted,
    Event,
    LeaseLost,
    Mode,
    ModeChanged,
    StopSignal,
)
from stopway_core.planner import Planned, Planner
from stopway_core.policies import NATIVE, POLICIES
from stopway_core.receipts import RankInfo, ReceiptBook
from stopway_core.replica import Replica
from stopway_core.signing import StopError, verify
from stopway_core.topology import stage_of
from stopway_core.turn import encode_turn
from stopway_core.wire import Frame, FrameKind, encode
from stopway_engine.config import PodConfig
from stopway_engine.control import front_link
from stopway_engine.control.follower import result_of
from stopway_engine.control.goodbye import GOODBYE_S, Goodbye
from stopway_engine.control.loop import ControlLoop, EpochEnded
from stopway_engine.control.shape import StepShape, StepTime
from stopway_engine.exec_thread import Done, ExecThread
from stopway_engine.grammar.compiler import GrammarCompiler
from stopway_engine.link import Link, LinkClosed
from stopway_engine.trace import request_spans

FRONT_RETRY_S = 0.2
STEP_TIMES_MAX = 1024
OVERLAP = 2  # steps in flight of one stage: the next is ready when one ends


class Leader(ControlLoop):
    """The only rank that decides, and that by asking the planner."""

    def __init__(
        self,
        config: PodConfig,
        epoch: int,
        nodes: list[str],
        planner_config: dict[str, Any],
        num_blocks: int,
        pod: Link,
        followers: list[Link],
        exec_thread: ExecThread,
        compiler: GrammarCompiler | None,
        front_path: str,
    ) -> None:
        super().__init__(config, 0, epoch, pod, exec_thread, compiler)
        self.replica = Replica(num_blocks, config.block_size, grammars=config.grammars)
        ranks = [
            RankInfo(rank, stage_of(rank, config.tensor), node) for rank, node in enumerate(nodes)
        ]
        self.book = ReceiptBook(config.group, epoch, ranks)
        self.planner = Planner(
            PlannerConfig(
                policy=POLICIES[config.policy],
                max_running=config.max_running,
                submit_age_s=config.submit_age_s,
                stages=config.pipeline,
                window=max(OVERLAP, config.pipeline),
                draft_tokens=config.draft_tokens,
                deadlines=config.deadlines,
                **planner_config,
            ),
            self.replica,
            self.book,
        )
        policy = self.planner.config.policy
        if policy.name != NATIVE.name:
            self.log(
                f"policy {policy.name}: stops, victims and recovery as there; "
                + ("" if policy.fenced else "unlike there, ")
                + "blocks are fenced where their use is not ordered behind the steps in flight; "
                "what else differs from the engine itself: docs/policies.md"
            )
        self.followers = followers
        self._rank_of = {id(link): index + 1 for index, link in enumerate(followers)}
        self._ready_ranks = {0: False, **dict.fromkeys(self._rank_of.values(), False)}
        mono = time.monotonic()
        for link in followers:
            link.heard_at = mono
            link.register(self.selector)
        self._front_path = front_path
        self._front: Link | None = None
        self._front_at = 0.0
        self._gateways: set[str] = set()  # membership only
        self._events: list[Event] = []
        self._launched: dict[int, float] = {}
        self._shapes: dict[int, StepShape] = {}  # of the steps in flight
        # Of the latest steps, to calibrate a simulation with.
        self.step_times: deque[StepTime] = deque(maxlen=STEP_TIMES_MAX)
        self._executed_at = 0.0
        self._load: dict[str, int] = {}
        self._mode = Mode.RUNNING  # as the front was last told
        self._mode_owed = False  # the front has said a word that was not answered yet
        self._goodbye: Goodbye | None = None  # from when all has ended
        self._clock = time.time() - mono  # planned time never jumps when the wall clock is set
        self._draining = False

    def now(self) -> float:
        """Unix seconds that only move forward."""
        return self._clock + time.monotonic()

    @property
    def state(self) -> str:
        if not self.serving:
            return "loading"
        return "draining" if self._draining else "ready"

    @property
    def serving(self) -> bool:
        """Whether every rank is loaded."""
        return all(self._ready_ranks.values())

    # --- what happens --------------------------------------------------------------------

    def on_frame(self, link: Link, frame: Frame) -> None:
        if link is self._front:
            if self._goodbye is None:  # later, nobody is left to do what it says
                front_link.receive(self, frame)
            return
        if frame.epoch != self.epoch:
            raise EpochEnded(f"{link.name} sent a frame of epoch {frame.epoch}")
        rank = self._rank_of[id(link)]
        body = frame.body
        if frame.kind is FrameKind.RESULT:
            self._events.append(Completed(result_of(frame)))
        elif frame.kind is FrameKind.PROGRESS:
            self._on_progress(rank, body)
        elif frame.kind is FrameKind.REPORT:
            if body.get("drain"):
                self.on_drain()
            for entry in body.get("stops", ()):
                self.on_stop_entry(entry)
            self.on_compiled(body.get("compiled", ()))
        elif frame.kind is not FrameKind.BYE:
            raise EpochEnded(f"{link.name} sent {frame.kind.name}")

    def _on_progress(self, rank: int, body: dict[str, Any]) -> None:
        if body["ready"]:
            self._ready_ranks[rank] = True
        for stop_id, turn, at in body["noticed"]:
            self.book.noticed(rank, stop_id, turn, at)
        self.book.progress(
            rank, body["applied"], body["applied_at"], body["executed"], body["executed_at"]
        )

    def on_done(self, done: Done) -> None:
        self._executed_at = done.at
        shape = self._shapes.pop(done.step, None)
        if shape is not None:
            self.step_times.append(shape.timed(done.seconds))
        self.book.progress(0, self.replica.turn, done.at, done.step, done.at)
        if done.result is not None:
            self._events.append(Completed(done.result))

    def on_compiled(self, reports: Iterable[tuple[int, str]]) -> None:
        self._events += [Compiled(slot, error) for slot, error in reports]

    def on_notice(self, entry: dict[str, Any], now: float) -> None:
        self.on_stop_entry(entry)

    def on_stop_entry(self, entry: Any) -> None:
        """A stop by whatever path: checked again here, where it takes effect."""
        try:
            stop = verify(entry, {"1": self.config.secret}, now=time.time())
        except StopError as error:
            self.log(f"a stop was refused: {error}")
        else:
            self._events.append(StopSignal(stop))

    def on_overdue(self, entries: list[Any]) -> None:
        for entry in entries:
            self.on_stop_entry(entry)

    def add_event(self, event: Event) -> None:
        """Something from the front, for the next turn."""
        self._events.append(event)

    def set_mode(self, mode: Mode) -> None:
        """An admin pauses the group, or resumes it: in the next turn. Each word is answered."""
        self._events.append(ModeChanged(mode))
        self._mode_owed = True

    # --- readiness, drain, loss ----------------------------------------------------------

    def on_ready(self) -> None:
        self._ready_ranks[0] = True

    def on_drain(self) -> None:
        if not self.serving:
            raise EpochEnded("told to drain before it served")
        if not self._draining:
            self._draining = True
            self._events.append(DrainStarted(self.now() + self.config.drain_s))
            self.to_front({"draining": self.config.drain_s})

    def on_closed(self, link: Link, why: str) -> None:
        if link is self._front:
            link.close()
            self._front = None
            # Nobody is left to deliver to: the front's sessions went with it.
            self._events += front_link.leases_lost(self._gateways)
            self._gateways.clear()
        elif self._goodbye is None or link is self.pod:
            raise EpochEnded(why)
        else:
            link.close()
            self.followers.remove(link)

    def on_beat(self, mono: float) -> None:
        if self._goodbye is not None:
            return  # the followers have been sent home, and that has a bound of its own
        turn = self.replica.turn
        counters = {"applied": turn, "executed": self.executed}
        keepalive = encode(FrameKind.KEEPALIVE, counters, epoch=self.epoch, turn=turn)
        for link in self.followers:
            self.check_heard(link, mono, link.name)
            self._send(link, keepalive)
        for step, launched_at in self._launched.items():
            if mono - launched_at > self.config.step_timeout_s:
                raise EpochEnded(
                    f"step {step} has not come back for {mono - launched_at:.0f} s, longer than "
                    f"step_timeout_s = {self.config.step_timeout_s:g}"
                )
            break  # the oldest is the first

    def _timers(self, mono: float) -> list[float | None]:
        if self._goodbye is not None:
            return [self._goodbye.until]
        timer = self.planner.next_timer()
        timers: list[float | None] = [None if timer is None else timer - self._clock]
        if self.serving and self._front is None:
            timers.append(self._front_at)
        return timers

    # --- turns ---------------------------------------------------------------------------

    def on_tick(self, mono: float) -> None:
        if not self.serving:
            return
        if self._goodbye is not None:
            # The followers have been sent home. What comes now, nobody is left to do; the end of
            # this epoch answers for it.
            self._leave(mono)
            return
        if self._front is None and mono >= self._front_at:
            self._connect_front(mono)
        while True:
            events, self._events = self._events, []
            planned = self.planner.turn(self.now(), events)
            if planned is None:
                break
            self._dispatch(planned)
        self._publish(None)
        self._tell_mode()
        if self.planner.drained:
            self._leave(mono)

    def _tell_mode(self) -> None:
        if self.planner.mode is not self._mode:
            self._mode = self.planner.mode
            self._mode_owed = True
            self.log(f"group {self.config.group}: mode {self._mode.value}")
        if self._mode_owed:
            self._mode_owed = False
            self.to_front({"mode": self._mode})

    def _dispatch(self, planned: Planned) -> None:
        turn = planned.turn
        if self.followers:
            frame = encode_turn(turn, self.epoch)
            for link in self.followers:
                self._send(link, frame)
        for result in turn.results:
            self._launched.pop(result.step, None)
        for step, shape in list(self._shapes.items()):
            if not shape.rids.isdisjoint(turn.ends):  # rows may leave: it may be cut short
                del self._shapes[step]
        if turn.launch is not None and planned.work is not None:
            self._launched[turn.launch.step] = time.monotonic()
            self._shapes[turn.launch.step] = StepShape.of(turn.launch, planned.work)
        self.run_turn(turn, planned.work)
        now = time.time()
        if planned.stops:
            self.stops_applied(planned.stops, turn.number, now)
            for stop in planned.stops:
                self.book.noticed(0, stop.stop_id, *self.stops.first_notice(stop.stop_id))
            self.book.progress(0, turn.number, now, self.executed, self._executed_at)
        for ended in planned.outputs.ended:
            self.add_spans(
                request_spans(
                    ended, {"stopway.group": self.config.group, "stopway.epoch": self.epoch}
                )
            )
        self._publish(planned)

    def _publish(self, planned: Planned | None) -> None:
        if self._front is None:
            return
        pool = self.replica.ledger.blocks
        planner = self.planner
        figures = (
            planner.running,
            planner.waiting,
            pool.free,
            pool.held,
            pool.idle,
            planner.drafted_tokens,
            planner.accepted_tokens,
        )
        load = dict(zip(names.LOAD, figures, strict=True))
        receipts = self.book.changed()
        changed = load if load != self._load else None
        if planned is None and not receipts and changed is None:
            return
        self._load = load
        body, arrays = front_link.outputs_frame(planned, receipts, changed)
        self.to_front(body, arrays)

    def to_front(self, body: dict[str, Any], arrays: list[list[int]] | None = None) -> None:
        """Send a frame to the front, if there is one."""
        if self._front is None:
            return
        frame = encode(
            FrameKind.FRONT_OUT, body, arrays or [], epoch=self.epoch, turn=self.replica.turn
        )
        try:
            self._front.send(frame)
        except LinkClosed as closed:
            self.on_closed(self._front, str(closed))

    def seen_gateway(self, gateway: str) -> None:
        """A gateway has asked for something; should the front die, its lease is lost."""
        self._gateways.add(gateway)

    def lease_lost(self, gateway: str) -> None:
        """A session broke: its requests stop in the next turn."""
        self._gateways.discard(gateway)
        self._events.append(LeaseLost(gateway))

    # --- inside --------------------------------------------------------------------------

    def _connect_front(self, mono: float) -> None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self._front_path)
        except OSError:
            sock.close()
            self._front_at = mono + FRONT_RETRY_S
            return
        self._front = Link(sock, "the front")
        self._front.register(self.selector)
        self._load = {}
        self.to_front(front_link.hello(self))

    def _leave(self, mono: float) -> None:
        """Everything has ended: say so to all, and go once they have heard it (or time is up)."""
        if self._goodbye is None:
            self._goodbye = Goodbye(mono)
            final = encode(FrameKind.FINAL, epoch=self.epoch, turn=self.replica.turn)
            for link in self.followers:
                self._send(link, final)
        if self._goodbye.over(mono, self.followers, self._front):
            if self._front is not None:
                self.log(f"the front has not read this epoch's last words in {GOODBYE_S:g} s")
            self.close()

    def _send(self, link: Link, frame: bytes) -> None:
        try:
            link.send(frame)
        except LinkClosed as closed:
            if self._goodbye is None:
                raise EpochEnded(str(closed)) from None
