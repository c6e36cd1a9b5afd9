"""One simulated request: what its client and its gateway know of it."""

from __future__ import annotations

from stopway_core.sequence import Seq
from stopway_sim.fleet.workload import Spec


class Request:
    """From its arrival to its outcome. Times are of the simulated clock, 0 for "not yet"."""

    __slots__ = (
        "acted_at",
        "admissions",
        "answered",
        "computed_max",
        "delivered_at_act",
        "effective_at",
        "ended",
        "first_leg",
        "issued_at",
        "noticed_at",
        "output",
        "prefill_at_act",
        "prefilled",
        "rid",
        "sent_at",
        "seq",
        "spec",
        "transferring",
    )

    def __init__(self, spec: Spec, sent_at: float) -> None:
        self.spec = spec
        self.sent_at = sent_at
        self.rid = 0  # while it runs
        self.seq: Seq | None = None  # while it runs
        self.admissions = 0
        self.first_leg = 0  # tokens that a prefill group has sampled
        self.output = 0  # tokens sampled when it last left a replica
        self.prefilled = 0  # prefill tokens launched for it
        self.computed_max = 0  # positions whose KV a preemption threw away
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
        """Tokens sampled so far."""
        if self.seq is None:
            return self.output
        return self.first_leg + len(self.seq.tokens) - self.seq.prompt_len
