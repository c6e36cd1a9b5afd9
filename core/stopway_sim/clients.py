"""Gateways as the leader sees them: they submit, stop, repeat themselves and disappear."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stopway_core.events import LeaseLost, Outputs, StopSignal, Submit
from stopway_core.types import Stop, Submission
from stopway_sim.clock import Link
from stopway_sim.failure import require
from stopway_sim.scenario import MS

if TYPE_CHECKING:
    from stopway_sim.world import World

RESEND_US = 200 * MS
RESEND_US_MAX = 3_200 * MS
_TERMINAL = ("reclaimed", "already_finished")


@dataclass(slots=True)
class StopState:
    """A stop at the gateway that sent it: true until it is resolved."""

    stop: Stop
    status: str = "accepted"
    epoch: int = 0  # in which its turn was
    epoch_ended: bool = False
    sends: int = 0

    @property
    def resolved(self) -> bool:
        return self.status in _TERMINAL or self.epoch_ended


@dataclass(slots=True)
class RequestState:
    """A request at the gateway that sent it."""

    submission: Submission
    keys: tuple[int, ...] = ()
    epoch: int = 0
    session: int = 0
    copies: int = 1  # sent and not refused; one is as good as the other
    outcomes: dict[int, str] = field(default_factory=dict)  # by choice

    @property
    def done(self) -> bool:
        return len(self.outcomes) == self.submission.choices

    def end(self, index: int, outcome: str) -> None:
        """Give one choice its one outcome."""
        require(index not in self.outcomes, f"{self.submission.uid}[{index}]: two outcomes")
        self.outcomes[index] = outcome

    def end_all(self, outcome: str) -> None:
        """Give every choice that has none yet this one: nobody else will."""
        for index in range(self.submission.choices):
            self.outcomes.setdefault(index, outcome)


class Gateway:
    """One gateway process; a session to the leader at a time, which is a lease."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.session = 1
        self.requests: dict[str, RequestState] = {}
        self.stops: dict[str, StopState] = {}
        delay = world.scenario.link_us_max
        self._out = Link(world.clock, world.chooser, delay)
        self._back = Link(world.clock, world.chooser, delay)
        self._of_key: dict[tuple[int, int], tuple[str, int]] = {}

    # --- what a client makes it do -------------------------------------------------------

    def submit(self, submission: Submission, *, twice: bool = False) -> None:
        """Send a request; ``twice`` repeats it, as a retry after a lost answer does."""
        state = self.requests[submission.uid] = RequestState(submission, session=self.session)
        world = self.world
        if world.group is None:
            state.end_all("rank_lost")
            return
        state.epoch = world.group.epoch
        state.copies += twice
        for _ in range(state.copies):
            self._send(state.epoch, lambda: world.on_submit(Submit(submission)))

    def publish(self, stop: Stop) -> None:
        """Stop something: a notice to every rank, and the direct path behind it."""
        self.stops[stop.stop_id] = StopState(stop)
        self.world.bus.publish(stop)
        self.world.clock.after(RESEND_US, lambda: self._resend(stop.stop_id, RESEND_US))

    def stop_now(self, stop: Stop) -> None:
        """Stop something of which the leader knows in its very next turn."""
        self.publish(stop)
        self.world.post(StopSignal(stop))

    def disconnect(self) -> None:
        """The session breaks; the leader learns of it after what was sent before."""
        world = self.world
        for state in self.requests.values():
            if state.session == self.session:
                state.end_all("rank_lost")
        self.session += 1
        world.coverage["gateway disconnects"] += 1
        if world.group is not None:
            self._send(world.group.epoch, lambda: world.post(LeaseLost(self.name)))

    def epoch_ended(self, epoch: int) -> None:
        """The group's processes are gone: this gateway ends what ran there."""
        self.session += 1
        for state in self.requests.values():
            if state.epoch == epoch:
                state.end_all("rank_lost")
        for stop in self.stops.values():
            if stop.epoch == epoch and not stop.resolved:
                stop.epoch_ended = True
                self.world.coverage["stops ended with their epoch"] += 1

    def _send(self, epoch: int, call: Any) -> None:
        def arrive() -> None:
            if self.world.group is not None and self.world.group.epoch == epoch:
                call()

        self._out.send(arrive)

    def _resend(self, stop_id: str, wait_us: int) -> None:
        state = self.stops[stop_id]
        if state.resolved:
            return
        world = self.world
        state.sends += 1
        world.coverage["stops sent again"] += 1
        if not world.faulty(world.scenario.post_drop):
            self._out.send(lambda: world.post(StopSignal(state.stop)))
        wait_us = min(2 * wait_us, RESEND_US_MAX)
        jitter = world.chooser.between(0, wait_us // 4)
        world.clock.after(wait_us + jitter, lambda: self._resend(stop_id, wait_us))

    # --- what the leader sends back ------------------------------------------------------

    def outputs(self, epoch: int, outputs: Outputs) -> None:
        """The leader's messages of one turn leave for this gateway."""
        session = self.session
        self._back.send(lambda: self._take(epoch, session, outputs))

    def receipt(self, epoch: int, receipt: dict[str, Any]) -> None:
        """The leader's receipt leaves for this gateway."""
        session = self.session

        def arrive() -> None:
            state = self.stops.get(receipt["stop_id"])
            if state is None or state.resolved or session != self.session:
                return
            state.status, state.epoch = receipt["status"], epoch
            if self.world.group is None or self.world.group.epoch != epoch:
                state.epoch_ended = not state.resolved

        self._back.send(arrive)

    def _take(self, epoch: int, session: int, outputs: Outputs) -> None:
        if session != self.session:
            return
        for accepted in outputs.accepted:
            state = self.requests.get(accepted.uid)
            if state is not None and state.session == session:
                state.keys = accepted.keys
                for index, key in enumerate(accepted.keys):
                    self._of_key[epoch, key] = (accepted.uid, index)
        for refused in outputs.refused:
            state = self.requests.get(refused.uid)
            if state is not None and state.session == session and refused.code != "duplicate":
                state.copies -= 1
                if not state.copies:
                    state.end_all(f"refused {refused.code}")
        for ended in outputs.ended:
            known = self._of_key.get((epoch, ended.key))
            if known is not None and self.requests[known[0]].session == session:
                self.requests[known[0]].end(known[1], ended.reason.value)
