"""The one way in which a request ends on its leader, whatever the reason."""

from __future__ import annotations

from stopway_core.composing import Composing
from stopway_core.deadlines import DeadlineHeap
from stopway_core.events import Ended
from stopway_core.grammars import GrammarBook
from stopway_core.lifecycle import Event as Life
from stopway_core.receipts import ReceiptBook
from stopway_core.replica import Replica
from stopway_core.requests import Choice, RequestTable
from stopway_core.schedule import Schedule
from stopway_core.types import Outcome, Reason, outcome_of


class Endings:
    """Gives requests their one outcome, and lets go of all that they hold."""

    def __init__(
        self,
        replica: Replica,
        receipts: ReceiptBook,
        requests: RequestTable,
        deadlines: DeadlineHeap,
        schedule: Schedule,
        grammars: GrammarBook,
    ) -> None:
        self._replica = replica
        self._receipts = receipts
        self._requests = requests
        self._deadlines = deadlines
        self._schedule = schedule
        self._grammars = grammars
        self.marked: dict[int, Choice] = {}  # by key: stops that are yet to take effect

    def end(
        self,
        choice: Choice,
        reason: Reason,
        composing: Composing,
        *,
        keep: int | None = None,
        message: str = "",
    ) -> tuple[int, int]:
        """End a choice, keeping ``keep`` of its output tokens (None: all).

        Returns (rid, or 0 when it held nothing; tokens discarded). A stop that had found it before
        is why it ends, whatever ends it now.
        """
        mark = choice.mark
        if mark is not None:
            reason = mark.reason
            if mark.keep is not None:  # else what comes until its end is delivered
                keep = mark.keep if keep is None else min(keep, mark.keep)
        rid = choice.rid if choice.seq is not None else 0
        produced = choice.output_len
        keep = produced if keep is None else min(keep, produced)
        discarded = choice.wasted_tokens + produced - keep
        if choice.seq is not None:
            discarded += choice.seq.pending
            choice.cached_tokens = max(choice.cached_tokens, choice.seq.cached_tokens)
            composing.drops[rid] = self._replica.end(rid)
            composing.turn.ends.append(rid)
            choice.seq = None
        if mark is not None:
            self._unmark(choice, rid, discarded, composing)
        self._schedule.leave(choice)
        if choice.submission.grammar:
            self._grammars.leave(choice, composing.turn)
        choice.move(Life.END)
        outcome = outcome_of(reason)
        self._deadlines.forget(choice.key)
        self._requests.remove(choice, outcome, composing.now)
        composing.outputs.ended.append(
            _ended(choice, outcome, reason, keep, discarded, composing.now, message)
        )
        return rid, discarded

    def end_all(self, reason: Reason, composing: Composing) -> None:
        """End everybody, oldest first."""
        for choice in list(self._requests.by_key.values()):
            self.end(choice, reason, composing)

    def _unmark(self, choice: Choice, rid: int, discarded: int, composing: Composing) -> None:
        """The stops that had marked a choice have taken effect on it."""
        mark, choice.mark = choice.mark, None
        del self.marked[choice.key]
        assert mark is not None
        for stop in mark.stops:
            entry = composing.entry(stop)
            if rid:
                entry.rids.append(rid)
            receipt = self._receipts.get(stop.stop_id)
            if receipt is not None:  # of more than are kept, the oldest is forgotten
                receipt.marked -= 1
                receipt.tokens_discarded += discarded


def _ended(
    choice: Choice,
    outcome: Outcome,
    reason: Reason,
    keep: int,
    discarded: int,
    now: float,
    message: str,
) -> Ended:
    return Ended(
        key=choice.key,
        uid=choice.submission.uid,
        index=choice.index,
        outcome=outcome,
        reason=reason,
        prompt_tokens=len(choice.submission.prompt),
        keep=keep,
        cached_tokens=choice.cached_tokens,
        discarded_tokens=discarded,
        preemptions=choice.preemptions,
        drafted_tokens=choice.drafted_tokens,
        accepted_tokens=choice.accepted_tokens,
        queued_at=choice.queued_at,
        ready_at=choice.ready_at,
        admitted_at=choice.admitted_at,
        first_token_at=choice.first_token_at,
        ended_at=now,
        traceparent=choice.submission.traceparent,
        message=message,
    )
