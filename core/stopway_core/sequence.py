"""A running request, as every rank has it."""

from __future__ import annotations

from stopway_core.ledger import REQUEST, Holder
from stopway_core.turn import Admit
from stopway_core.types import NO_SOURCE, Pulse, SamplingParams


class Seq:
    """A running request. ``tokens`` and ``blocks`` are append-only: exec threads read prefixes."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "chain",
        "confirmed",
        "grammar",
        "holder",
        "last_step",
        "launched",
        "live",
        "params",
        "pending",
        "prompt_len",
        "pulse",
        "rejected",
        "rid",
        "sealed",
        "source",
        "tokens",
    )

    def __init__(self, admit: Admit) -> None:
        self.rid = admit.rid
        self.tokens = admit.tokens
        self.prompt_len = admit.prompt_len
        self.params: SamplingParams = admit.params
        self.grammar = admit.grammar
        self.holder: Holder = (REQUEST, admit.rid)
        self.blocks: list[int] = []
        self.cached_tokens = 0  # whose KV was there at admission
        self.launched = 0  # positions whose KV is written or being written
        self.confirmed = 0  # positions whose KV is written by completed steps
        self.sealed = 0  # blocks that are sealed, from the front
        self.chain: list[int] = []  # cache entries: the root, then one for each sealed block
        self.last_step = 0
        self.pending = 0  # sampling rows of steps in flight
        self.source = NO_SOURCE  # (step, index among its sampling rows) of the newest of them
        self.live = True  # runs in this replica
        self.rejected = False  # its grammar allowed no token: it ends with this turn
        self.pulse = Pulse()
