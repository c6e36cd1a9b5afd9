"""Which group gets a request, and when: at once, when one is ready, or again after a refusal."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from stopway_core.types import DEADLINE_REASONS, Reason
from stopway_gateway.config import Settings
from stopway_gateway.generation import tenant_salt
from stopway_gateway.placement import Placement, takes
from stopway_gateway.registry import Registry
from stopway_gateway.request import Refusal, Request
from stopway_gateway.session import LeaderSession

ATTEMPTS_MAX = 3  # the first, another group's, and that of one which has come back meanwhile
_AGAIN = frozenset({Reason.RANK_LOST, Reason.DRAIN})


@dataclass(frozen=True, slots=True)
class _No:
    """A group's refusal, which stands until the group says that it is another one by now."""

    session: LeaderSession
    stretch: int
    mode_messages: int | None  # None: its mode was not why

    @property
    def stands(self) -> bool:
        session = self.session
        said = self.mode_messages is not None and session.mode_messages != self.mode_messages
        return session.stretch == self.stretch and not said


@dataclass(slots=True)
class _Placing:
    """A live request: what it waits for while it is with no group."""

    request: Request
    deadline: float  # monotonic
    late: Reason  # why it ends when no group took it by then
    refusal: Refusal | None = None  # the latest
    noes: list[_No] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        request = self.request
        return request.outcome is None and not request.gone and not request.dispatched

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Dispatcher:
    """Gives each request to a group, or settles it when none takes it in time.

    Nothing was delivered of what a group refused because it drains or lost a rank: that waits for
    a group again, in what is left of its time.
    """

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._placement = Placement()
        self._placings: dict[str, _Placing] = {}  # of live requests, in the order they came

    async def dispatch(self, request: Request) -> None:
        """Return when a group has the request, when it is settled, or when its client has gone."""
        bounds = [(self._settings.dispatch_wait_s, Reason.RANK_LOST)]
        for name, ending in DEADLINE_REASONS.items():
            limit = request.generation.deadlines[name]
            if limit is not None:
                bounds.append((limit, ending))
        patience, late = min(bounds, key=lambda each: each[0])
        placing = _Placing(request, request.came + patience, late)
        self._placings[request.uid] = placing
        self._place_or_wait(placing)
        while placing.waits:
            await request.changed(max(0.001, placing.deadline - time.monotonic()))

    def touch(self) -> None:
        """How a group stands has changed: what waits is tried again."""
        for placing in list(self._placings.values()):
            if placing.waits:
                self._place(placing)

    def forget(self, request: Request) -> None:
        """It is settled."""
        placing = self._placings.pop(request.uid, None)
        if placing is not None:
            placing.stop_timer()

    def refused(self, session: LeaderSession, request: Request, refusal: Refusal) -> None:
        """Place it again if another group, or another life of this one, may take it."""
        placing = self._placings[request.uid]
        unwanted = request.cut is not None or request.gone or request.accepted
        final = refusal.status != 503 or refusal.code not in _AGAIN
        if unwanted or final or request.attempt >= ATTEMPTS_MAX:
            if refusal.code == "duplicate" and placing.refusal is not None:
                # The link to its leader broke as it was passed on, and came back: what counts is
                # that the earlier attempt was lost.
                refusal = placing.refusal
            request.on_refused(refusal)
            return
        drains = refusal.code == Reason.DRAIN
        stretch = session.stretch if drains else request.stretch
        placing.noes.append(_No(session, stretch, session.mode_messages if drains else None))
        placing.refusal = refusal
        session.take_back(request)
        request.attempt += 1
        self._place_or_wait(placing)

    def _place_or_wait(self, placing: _Placing) -> None:
        self._place(placing)
        if placing.waits:
            in_s = max(0.0, placing.deadline - time.monotonic())
            placing.timer = asyncio.get_running_loop().call_later(in_s, self._give_up, placing)

    def _place(self, placing: _Placing) -> None:
        request = placing.request
        ready = self._registry.ready()
        noes = {no.session for no in placing.noes if no.stands}
        session = self._placement.choose(
            [session for session in ready if session not in noes],
            request.tenant,
            request.generation.conversation,
        )
        if session is not None:
            placing.stop_timer()
            session.submit(request, self._submission(request))
            request.poke()
        elif ready and not any(map(takes, ready)) and not self._others_come():
            request.settle(Reason.DRAIN, "Every group drains, for its admin; try again later.")

    def _others_come(self) -> bool:
        """Whether a group that takes nothing now may do so soon: its ranks form anew."""
        return any(
            not (session.ready or session.draining or session.superseded)
            for session in self._registry.sessions()
        )

    def _give_up(self, placing: _Placing) -> None:
        if not placing.waits:
            return
        if placing.refusal is not None and placing.late is Reason.RANK_LOST:
            placing.request.on_refused(placing.refusal)
        else:
            placing.request.settle(placing.late, "No group is ready; try again soon.")

    def _submission(self, request: Request) -> dict[str, object]:
        generation = request.generation
        waited_s = time.monotonic() - request.came
        trace_ids = request.trace
        return {
            "type": "submit",
            "uid": request.uid,
            "attempt": request.attempt,
            "tenant": request.tenant,
            "salt": tenant_salt(self._settings.secret.get_secret_value(), request.tenant),
            "n": generation.n,
            "priority": generation.priority,
            "grammar": generation.grammar,
            "prompt": generation.prompt,
            "params": generation.params,
            "stop": generation.stop,
            "include_stop_str_in_output": generation.include_stop,
            # They run from the arrival here; the front counts from the arrival there.
            "deadlines": {
                name: None if limit is None else max(0.001, limit - waited_s)
                for name, limit in generation.deadlines.items()
            },
            "conversation": generation.conversation,
            "traceparent": f"00-{trace_ids.trace_id}-{trace_ids.span_id}-01",
            "minted_at": time.time(),
        }
