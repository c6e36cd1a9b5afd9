"""How many blocks stay free for those who run when another request is admitted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stopway_core.policy import Policy, Reserve
from stopway_core.replica import Replica
from stopway_core.requests import Choice

RATIO_FIRST = 0.7
RATIO_LEAST = 0.098  # 0.14 of the first
RATIO_STEPS = 600  # that decode, in which it sinks from the one to the other
RATIO_AHEAD = 20  # tokens that each must find room for after a preemption
RATIO_REST_MAX = 4096  # tokens: more of what one may still generate is not counted


class Reserves:
    """The reserve of one policy; only that of ``RATIO`` has a state.

    Source of ``RATIO``: SGLang's new-token ratio, which sinks with each step that decodes, and is
    set anew, to what turned out to be needed, when somebody has been retracted. Who is to be
    admitted must fit with all that it may generate, beside that share of those who run.
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
        return replica.blocks_of(int(sum(map(self._share, runners()))))

    def wanted(self, choice: Choice, blocks: int) -> int:
        """Blocks that must be there for ``choice``, which takes ``blocks`` at once."""
        length = len(choice.tokens)
        match self._kind:
            case Reserve.WHOLE:
                end = choice.length_max
            case Reserve.RATIO:
                end = length + _rest(choice)
            case _:
                return blocks
        return blocks + self._replica.blocks_of(end) - self._replica.blocks_of(length)

    def decoded(self) -> None:
        """A step that decodes is launched, and nobody had to go for it."""
        self._ratio = max(RATIO_LEAST, self._ratio - (RATIO_FIRST - RATIO_LEAST) / RATIO_STEPS)

    def idle(self) -> None:
        """Nothing runs and nothing waits: what was learned is forgotten."""
        self._ratio = RATIO_FIRST

    def preempted(self, left: Collection[Choice]) -> None:
        """Somebody had to go; those ``left`` decode on."""
        if self._kind is not Reserve.RATIO:
            return
        if not left:  # who came was more important: a retraction of SGLang's keeps one
            self._ratio = RATIO_LEAST
            return
        # May be less than the least, as there, until the next step that decodes.
        made = sum(choice.output_len for choice in left)
        asked = sum(choice.length_max - choice.prompt_len for choice in left)
        self._ratio = min(1.0, (made + RATIO_AHEAD * len(left)) / (asked + 1))

    def _share(self, choice: Choice) -> float:
        """Tokens that are kept for one who runs; all, for one whom this very plan has admitted."""
        assert choice.seq is not None
        return _rest(choice) * (self._ratio if choice.seq.last_step else 1.0)

    def _left(self, choice: Choice) -> int:
        assert choice.seq is not None
        return max(0, self._replica.blocks_of(choice.length_max) - len(choice.seq.blocks))


def _rest(choice: Choice) -> int:
    return min(choice.length_max - len(choice.tokens), RATIO_REST_MAX)
