"""One request as its gateway sees it: what came from the leader, what is cut, how it ended.

Fed by the leader's session (``on_*``, never blocking), read by the handler that delivers. The
outcome is settled once, the first wins, and it does not wait for any delivery or cleanup.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stopway_core.types import Outcome, Reason, finish_reason_of, outcome_of
from stopway_gateway.generation import Generation


@dataclass(slots=True)
class Item:
    """A piece of text as it came."""

    text: str
    tokens: int
    logprobs: list[dict[str, Any]] | None


@dataclass(slots=True)
class End:
    """How one choice ended. ``text`` is what was still held back."""

    outcome: Outcome
    reason: Reason
    finish_reason: str
    text: str = ""
    stop_string: str | None = None
    completion_tokens: int = 0
    discarded_tokens: int = 0
    drafted_tokens: int = 0  # guessed ahead and verified
    accepted_tokens: int = 0  # of them, those that were right
    message: str = ""


@dataclass(slots=True)
class Choice:
    """One of ``n``. ``pending`` waits to be delivered; ``closed``: its end was delivered."""

    index: int
    pending: deque[Item] = field(default_factory=deque)
    kept: list[Item] = field(default_factory=list)
    end: End | None = None
    closed: End | None = None
    tokens: int = 0
    began: bool = False
    chars: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a request stands in a trace."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    links: tuple[tuple[str, str], ...] = ()


_STOPS = frozenset({Reason.CLIENT_CANCEL, Reason.CLIENT_DISCONNECT, Reason.ADMIN})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A leader's 4xx or 5xx: nothing was delivered."""

    status: int
    message: str
    code: str | None
    param: str | None

    @property
    def reason(self) -> Reason:
        """Why the request ended: as the code says, or else by the client's fault or the group's."""
        if self.code in set(Reason):
            return Reason(self.code)
        return Reason.BAD_INPUT if self.status < 500 else Reason.RANK_LOST


class Request:
    """See the module. ``on_settled`` is called once, with the outcome already set."""

    def __init__(
        self,
        uid: str,
        tenant: str,
        generation: Generation,
        trace: Trace,
        client_request_id: str,
        pending_chars_max: int,
    ) -> None:
        self.uid = uid
        self.tenant = tenant
        self.generation = generation
        self.trace = trace
        self.client_request_id = client_request_id
        self.created = time.time()
        self.came = time.monotonic()
        self.attempt = 1  # at a group: how many were asked, with that one
        self.choices = [Choice(index) for index in range(generation.n)]
        self.stop_ids: list[str] = []
        self.group = ""  # set when it is dispatched
        self.policy = ""  # of the group
        self.epoch: int | None = None
        self.stretch = 0  # of its session, when it was submitted
        self.accepted = False
        self.refused = False  # its leader never had it, and never will
        self.refusal: Refusal | None = None  # what to tell the client of that
        self.cut: Reason | None = None
        self.cut_at = 0.0
        self.leader_told = False  # a stop that names it is sent until it has arrived
        self.gone = False  # nobody is there to deliver to
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.first_text_at = 0.0
        self.outcome: Outcome | None = None
        self.reason: Reason | None = None
        self.ended_at = 0.0
        self.on_settled: Callable[[Request], None] = lambda _: None
        self.release: Callable[[], None] = lambda: None  # of the session that it is on
        self.on_overflow: Callable[[Request], None] = lambda _: None
        self._pending_chars = 0
        self._pending_chars_max = pending_chars_max
        self._wake = asyncio.Event()

    # --- from the leader ----------------------------------------------------------------------

    def on_accepted(self, prompt_tokens: int) -> None:
        """The leader has queued it."""
        self.accepted = True
        self.prompt_tokens = prompt_tokens
        self._wake.set()

    def on_refused(self, refusal: Refusal) -> None:
        """The leader will not have it. Of one that was stopped before, that is no news.

        A stop may have met it on its way to the leader, before this gateway has heard of it.
        """
        self.refused = True
        if refusal.code in _STOPS:
            self.cut_by(refusal.reason)
        if self.cut is not None:
            self.settle(self.cut)
            return
        self.refusal = refusal
        self.settle(refusal.reason, refusal.message)

    def on_out(self, index: int, item: Item) -> None:
        """Text for one choice."""
        choice = self.choices[index]
        self.accepted = True
        if self.gone or choice.end is not None or choice.closed is not None:
            return
        if not self.first_text_at:
            self.first_text_at = time.time()
        if not self.generation.stream and self.cut is None:
            choice.kept.append(item)
            choice.tokens += item.tokens
            return
        choice.pending.append(item)
        self._pending_chars += len(item.text)
        self._wake.set()
        if self._pending_chars > self._pending_chars_max:
            self.on_overflow(self)

    def on_end(self, index: int, end: End) -> None:
        """One choice has ended; the request has when all have."""
        choice = self.choices[index]
        self.accepted = True
        if choice.end is None:
            choice.end = end
        self._wake.set()
        if all(c.end is not None for c in self.choices):
            self._settle_from_ends()

    # --- from the stop path -------------------------------------------------------------------

    def cut_by(self, reason: Reason) -> None:
        """Deliver nothing more, from now on; the leader still says how it ended."""
        if self.cut is None and self.outcome is None:
            self.cut = reason
            self.cut_at = time.monotonic()
            self._wake.set()

    def settle(self, reason: Reason, message: str = "") -> None:
        """End every choice that has not ended, for ``reason``, without the leader."""
        outcome = outcome_of(reason)
        for choice in self.choices:
            if choice.end is None:
                choice.end = End(
                    outcome,
                    reason,
                    finish_reason_of(reason),
                    completion_tokens=choice.tokens + sum(i.tokens for i in choice.pending),
                    message=message,
                )
        self._wake.set()
        self._settle_from_ends()

    def _settle_from_ends(self) -> None:
        if self.outcome is not None:
            return
        ends = [c.end for c in self.choices if c.end is not None]
        # One outcome for all choices: the worst that one of them had.
        for outcome in (Outcome.FAILED, Outcome.STOPPED, Outcome.FINISHED):
            for end in ends:
                if end.outcome is outcome and self.outcome is None:
                    self.outcome, self.reason = outcome, end.reason
        self.ended_at = time.time()
        self.release()
        self.on_settled(self)

    # --- for the handler ----------------------------------------------------------------------

    @property
    def dispatched(self) -> bool:
        """Whether a leader was sent it."""
        return bool(self.group)

    @property
    def started(self) -> bool:
        """Whether there is something to answer with."""
        # A grammar that cannot be compiled is found out after the request was queued, and a 400
        # can be said only before the headers have gone.
        compiled = not self.generation.grammar or bool(self.first_text_at)
        return (
            (self.accepted and compiled)
            or self.refusal is not None
            or self.outcome is not None
            or self.cut is not None
            or self.gone
        )

    def poke(self) -> None:
        """Have the handler look again."""
        self._wake.set()

    def leave(self) -> None:
        """Nobody is there any more; what waits is dropped and so is what comes."""
        self.gone = True
        self._pending_chars = 0
        for choice in self.choices:
            choice.pending.clear()
        self._wake.set()

    async def changed(self, timeout_s: float) -> None:
        """Until something happened to it, or for ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def take(self, choice: Choice) -> list[Item]:
        """What may be delivered now. After a cut: nothing, unless the choice had finished."""
        if self.cut is not None and (
            choice.end is None or choice.end.outcome is not Outcome.FINISHED
        ):
            return []
        items = list(choice.pending)
        choice.pending.clear()
        self._pending_chars -= sum(len(item.text) for item in items)
        choice.tokens += sum(item.tokens for item in items)
        return items

    def close_choice(self, choice: Choice, cut_wait_s: float) -> End | None:
        """The end to deliver, once: the leader's, or ``abort`` when a cut has waited enough."""
        if choice.closed is not None:
            return None
        end = choice.end
        if end is None:
            if self.cut is None or time.monotonic() < self.cut_at + cut_wait_s:
                return None
            end = End(Outcome.STOPPED, self.cut, "abort")
        if self.cut is not None and end.outcome is Outcome.STOPPED:
            end.text = ""  # held back at the cut, and cut with it
        elif end.completion_tokens:
            choice.tokens = end.completion_tokens
        choice.closed = end
        return end

    @property
    def closed(self) -> bool:
        """Whether the end of every choice was delivered."""
        return all(choice.closed is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """``usage``: what was delivered, and how much was computed beyond it."""
        delivered = sum(choice.tokens for choice in self.choices)
        discarded = 0
        for choice in self.choices:
            end = choice.closed or choice.end
            computed = end.completion_tokens + end.discarded_tokens if end else 0
            known = choice.tokens + sum(item.tokens for item in choice.pending)
            discarded += max(computed, known) - choice.tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": delivered,
            "total_tokens": self.prompt_tokens + delivered,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "stopway": {"discarded_tokens": discarded},
        }
        ends = [end for choice in self.choices if (end := choice.closed or choice.end)]
        drafted = sum(end.drafted_tokens for end in ends)
        if drafted:
            accepted = sum(end.accepted_tokens for end in ends)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage

    def to_json(self) -> dict[str, Any]:
        """As ``GET /v1/requests/{id}`` shows it."""
        generation = self.generation
        return {
            "id": self.uid,
            "object": "request",
            "created": self.created,
            "ended": self.ended_at or None,
            "status": self._status(),
            "outcome": self.outcome,
            "reason": self.reason,
            "kind": generation.kind,
            "model": generation.model,
            "stream": generation.stream,
            "n": generation.n,
            "priority": generation.priority,
            "tenant": self.tenant,
            "conversation": generation.conversation or None,
            "client_request_id": self.client_request_id or None,
            "group": self.group or None,
            "epoch": self.epoch,
            "stop_ids": list(self.stop_ids),
            "trace_id": self.trace.trace_id,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(
                choice.end.completion_tokens if choice.end else choice.tokens
                for choice in self.choices
            ),
        }

    def _status(self) -> str:
        if self.outcome is not None:
            return "finished"
        if self.cut is not None:
            return "stopping"
        if self.first_text_at:
            return "running"
        return "queued" if self.accepted else "submitting" if self.dispatched else "waiting"
