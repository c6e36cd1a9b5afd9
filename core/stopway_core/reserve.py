"""How many blocks stay free for those who run when another request is admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stopway_core.policy import Policy, Reserve
from stopway_core.replica import Replica
from stopway_core.requests import Choice

RATIO_FIRST = 0.7
RATIO_LEAST = 0.098  # 0.14 of the first
RATIO_STEPS = 600  # admissions in which it sinks from the one to the other
RATIO_AHEAD = 20  # tokens that each must find room for after a preemption


class Reserves:
    """The reserve of one policy; only that of ``RATIO`` has a state.

    Source of ``RATIO``: SGLang's new-token ratio, which sinks while all goes well and is set anew,
    to what turned out to be needed, when somebody has been retracted.
    """

    def __init__(self, policy: Policy, replica: Replica) -> None:
        self._kind = policy.reserve
        self._replica = replica
        self._ratio = RATIO_FIRST

    def blocks(self, count: int, runners: Callable[[], Sequence[Choice]]) -> int:
        """Blocks to be left for the ``count`` requests that run, which ``runners`` returns."""
        replica = self._replica
        match self._kind:
            case Reserve.NONE:
                return 0
            case Reserve.BLOCK_EACH:
                return min(count, replica.ledger.blocks.total // 16)
            case Reserve.WHOLE:
                return sum(self._left(choice) for choice in runners())
        self._ratio = max(RATIO_LEAST, self._ratio - (RATIO_FIRST - RATIO_LEAST) / RATIO_STEPS)
        tokens = sum(choice.length_max - len(choice.tokens) for choice in runners())
        return replica.blocks_of(int(tokens * self._ratio))

    def wanted(self, choice: Choice, blocks: int) -> int:
        """Blocks that must be there for ``choice``, which takes ``blocks`` at once."""
        if self._kind is not Reserve.WHOLE:
            return blocks
        more = self._replica.blocks_of(choice.length_max) - self._replica.blocks_of(
            len(choice.tokens)
        )
        return blocks + more

    def preempted(self, runners: Callable[[], Sequence[Choice]]) -> None:
        """Somebody had to go; those that ``runners`` returns run on."""
        if self._kind is not Reserve.RATIO:
            return
        left = runners()
        asked = sum(choice.length_max - choice.prompt_len for choice in left)
        if asked:
            made = sum(choice.output_len for choice in left)
            self._ratio = min(1.0, (made + RATIO_AHEAD * len(left)) / asked)

    def _left(self, choice: Choice) -> int:
        assert choice.seq is not None
        return max(0, self._replica.blocks_of(choice.length_max) - len(choice.seq.blocks))
