"""One simulated request, and its answers: what its client and its gateway know of it."""

from __future__ import annotations

from stopway_core.sequence import Seq
from stopway_core.types import Outcome, Reason, outcome_of
from stopway_sim.fleet.workload import Spec

_WORST = (Outcome.FINISHED, Outcome.STOPPED, Outcome.FAILED)


class Answer:
    """One of the ``choices`` of a request, on the group where it is now."""

    __slots__ = ("computed_max", "ended", "output", "request", "seq")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seq: Seq | None = None  # while it runs
        self.output = 0  # tokens sampled when it last left a replica
        self.computed_max = 0  # positions whose KV a preemption threw away
        self.ended = False

    @property
    def produced(self) -> int:
        """Tokens sampled so far."""
        if self.seq is None:
            return self.output
        return self.request.first_leg + len(self.seq.tokens) - self.seq.prompt_len

    def leave(self) -> None:
        """It is in no replica any more."""
        self.output, self.seq = self.produced, None


class Request:
    """From its arrival to its outcome. Times are of the simulated clock, 0 for "not yet"."""

    __slots__ = (
        "acted_at",
        "admitted",
        "answered",
        "answers",
        "delivered_at_act",
        "discarded",
        "effective_at",
        "ended",
        "first_leg",
        "first_token_at",
        "issued_at",
        "noticed_at",
        "prefill_at_act",
        "prefilled",
        "reason",
        "sent_at",
        "spec",
        "transferring",
    )

    def __init__(self, spec: Spec, sent_at: float) -> None:
        self.spec = spec
        self.sent_at = sent_at
        self.answers = [Answer(self) for _ in range(spec.choices)]
        self.admitted = False  # one of them has entered a replica
        self.first_token_at = 0.0  # at a leader, of those that have ended
        self.first_leg = 0  # tokens that a prefill group has sampled
        self.prefilled = 0  # prefill tokens launched for it
        self.discarded = 0  # tokens sampled for those that have ended, and not kept
        self.reason: Reason | None = None  # of the worst end so far
        self.transferring = False
        self.ended = False
        # Of its client's giving up.
        self.acted_at = 0.0
        self.issued_at = 0.0
        self.noticed_at = 0.0
        self.effective_at = 0.0
        self.answered = False  # its stop came too late
        self.delivered_at_act = 0
        self.prefill_at_act = 0

    @property
    def produced(self) -> int:
        """Tokens sampled so far, of all answers."""
        return sum(answer.produced for answer in self.answers)

    @property
    def running(self) -> bool:
        """Whether an answer is in a replica."""
        return any(answer.seq is not None for answer in self.answers)

    def has_end(self, reason: Reason) -> Reason | None:
        """An answer has ended; returns why all have, once they have: the worst end's reason.

        A failed answer is worse than a stopped one, and that than a finished one.
        """
        if self.reason is None or _rank(reason) > _rank(self.reason):
            self.reason = reason
        return self.reason if all(answer.ended for answer in self.answers) else None


def _rank(reason: Reason) -> int:
    return _WORST.index(outcome_of(reason))
