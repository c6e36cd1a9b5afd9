"""From the results of steps to tokens for the front, and to the ends that tokens bring."""

from __future__ import annotations

from dataclasses import dataclass

from stopway_core.composing import Composing
from stopway_core.config import PlannerConfig
from stopway_core.deadlines import DeadlineHeap
from stopway_core.endings import Endings
from stopway_core.events import Outputs
from stopway_core.lifecycle import Event as Life
from stopway_core.replica import Replica
from stopway_core.requests import Choice
from stopway_core.schedule import Schedule
from stopway_core.sequence import Seq
from stopway_core.turn import Sampled
from stopway_core.types import DROPPED, REJECTED, Logprobs, Reason, StepResult

DEAD_END = "the grammar allows no token to go on with, or has become too complex: simplify it"


class Delivery:
    """Takes what completed steps sampled."""

    def __init__(
        self,
        config: PlannerConfig,
        replica: Replica,
        schedule: Schedule,
        deadlines: DeadlineHeap,
        endings: Endings,
    ) -> None:
        self._config = config
        self._replica = replica
        self._schedule = schedule
        self._deadlines = deadlines
        self._endings = endings
        self.drafted_tokens = 0  # verified by completed steps, delivered or not
        self.accepted_tokens = 0

    def take(self, results: list[StepResult], composing: Composing) -> None:
        """Deliver what completed steps sampled, then end whom that finishes.

        All results come before all ends, in the turn as here, so that every replica sees the same
        requests alive while it confirms the steps.
        """
        ending: dict[int, _Ending] = {}  # by key
        for result in results:
            sampled = Sampled(result.step, result.tokens, result.counts)
            composing.turn.results.append(sampled)
            at = 0
            for seq, samples, tokens in self._replica.results(sampled):
                choice = self._whose(composing.now, seq, samples, tokens)
                if choice is not None and choice.key not in ending:
                    found = self._deliver(choice, tokens, result.logprobs, at, composing.outputs)
                    if found is not None:
                        ending[choice.key] = found
                at += len(tokens)
        for end in ending.values():
            self._endings.end(end.choice, end.reason, composing, keep=end.keep, message=end.message)

    def _whose(self, now: float, seq: Seq, samples: int, tokens: list[int]) -> Choice | None:
        """Whom a row's tokens are for; ``None`` when its end counts them as discarded."""
        schedule = self._schedule
        if samples > 1 and tokens[-1] != DROPPED:
            self.drafted_tokens += samples - 1
            self.accepted_tokens += len(tokens) - 1
        choice = schedule.decoding.get(seq.rid)
        if choice is None and seq.live:
            choice = schedule.first_token(seq.rid)
            choice.move(Life.TOKEN)
            self._has_token(now, choice)
        elif choice is None:
            choice = schedule.stale.get(seq.rid)
            if choice is None or tokens[-1] < 0:
                return None
            # What was in flight at a preemption need not be computed again.
            choice.wasted_tokens -= 1
            choice.tokens.extend(tokens)
            self._has_token(now, choice)
        if samples > 1:
            choice.drafted_tokens += samples - 1
            choice.accepted_tokens += len(tokens) - 1
            if choice.drafter is not None:
                choice.drafter.verified(samples - 1, len(tokens) - 1)
        return choice

    def _has_token(self, now: float, choice: Choice) -> None:
        if not choice.first_token_at:
            choice.first_token_at = now
            self._deadlines.met_first_token(choice.key)

    def _deliver(
        self,
        choice: Choice,
        tokens: list[int],
        logprobs: list[Logprobs | None],
        at: int,
        outputs: Outputs,
    ) -> _Ending | None:
        """Pass on ``tokens``, which its sequence has already; say whether they end it."""
        rejected = tokens[-1] == REJECTED
        if rejected:
            tokens = tokens[:-1]
        mark = choice.mark
        silent = mark is not None and mark.keep is not None
        produced = choice.output_len - len(tokens)
        for index, token in enumerate(tokens):
            produced += 1
            if not silent:
                outputs.keys.append(choice.key)
                outputs.tokens.append(token)
                outputs.logprobs.append(logprobs[at + index] if logprobs else None)
            if token in choice.enders and produced >= choice.params.min_tokens:
                # A stop token of the client's may stand anywhere in a grammar; the end of the
                # sequence only where that is complete.
                whole = choice.submission.grammar and token in self._config.eos_ids
                return _Ending(choice, Reason.GRAMMAR_END if whole else Reason.EOS, produced)
        if len(choice.tokens) >= choice.length_max:
            return _Ending(choice, Reason.LENGTH, produced)
        if rejected:
            return _Ending(choice, Reason.BAD_INPUT, produced, DEAD_END)
        return None


@dataclass(slots=True)
class _Ending:
    """What a result does to a request: it ends with ``keep`` output tokens."""

    choice: Choice
    reason: Reason
    keep: int
    message: str = ""
