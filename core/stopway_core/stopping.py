"""Stops on their leader: whom they mean, when they take effect, what their receipts say."""

from __future__ import annotations

from stopway_core.composing import Composing
from stopway_core.config import PlannerConfig
from stopway_core.endings import Endings
from stopway_core.events import LeaseLost, Mode
from stopway_core.grammars import GrammarBook
from stopway_core.lifecycle import Event as Life
from stopway_core.marks import Mark, effect_on, is_due
from stopway_core.policy import Effect
from stopway_core.receipts import Receipt, ReceiptBook
from stopway_core.replica import Replica, StopApplied, stop_applied
from stopway_core.requests import Choice, RequestTable
from stopway_core.schedule import Schedule
from stopway_core.types import Reason, Stop, outcome_of


class Stopping:
    """Resolves stops. Under ``native`` each takes effect in the turn that it comes in."""

    def __init__(
        self,
        config: PlannerConfig,
        replica: Replica,
        receipts: ReceiptBook,
        requests: RequestTable,
        schedule: Schedule,
        grammars: GrammarBook,
        endings: Endings,
    ) -> None:
        self._policy = config.policy
        self._replica = replica
        self._receipts = receipts
        self._requests = requests
        self._schedule = schedule
        self._grammars = grammars
        self._endings = endings

    def stop(self, stop: Stop, composing: Composing) -> None:
        """A stop has come; one that came before is published again."""
        if self._receipts.get(stop.stop_id) is not None:
            self._receipts.touch(stop.stop_id)
            return
        receipt = self._receipts.open(stop)
        composing.entry(stop)  # also when it matches nothing
        if not stop.target.uids:
            self.selector(stop, receipt, composing)
            return
        named: set[str] = set()  # membership only: a parent and its child may both be named
        for uid in dict.fromkeys(stop.target.uids):
            if uid not in named:
                named.update(self._uid(uid, stop, receipt, composing))

    def selector(self, stop: Stop, receipt: Receipt, composing: Composing) -> None:
        """Stop all that a selector means now."""
        for choice in self._requests.select(stop):
            self._choice(choice, stop, receipt, composing)

    def came_with(self, stop: Stop, composing: Composing) -> None:
        """A selector that takes effect in this turn also means what was submitted before it."""
        receipt = self._receipts.get(stop.stop_id)
        if receipt is not None and stop.stop_id in composing.entries:
            self.selector(stop, receipt, composing)

    def lease_lost(self, event: LeaseLost, composing: Composing) -> None:
        """Nobody is left whom a gateway's requests could go to."""
        for choice in self._requests.of_gateway(event.gateway):
            reason = Reason.CLIENT_DISCONNECT
            if choice.mark is None and self._mark(choice, reason, composing) is None:
                self._endings.end(choice, reason, composing)

    def born(self, choices: list[Choice], composing: Composing) -> None:
        """Stop at once what a stop that came before it has named."""
        for choice in choices:
            submission = choice.submission
            for uid in dict.fromkeys((submission.uid, choice.uid)):
                stop = self._requests.tombstone(uid, submission.tenant)
                if stop is not None:
                    receipt = self._receipts.open(stop)
                    receipt.arrived(uid)
                    composing.entry(stop)
                    self._choice(choice, stop, receipt, composing)
                    break

    def _uid(self, uid: str, stop: Stop, receipt: Receipt, composing: Composing) -> list[str]:
        """Stop what goes by ``uid``; returns the uids of the choices that it found."""
        mine = [
            choice for choice in self._requests.live(uid) if stop.reaches(choice.submission.tenant)
        ]
        for choice in mine:
            self._choice(choice, stop, receipt, composing)
        if mine:
            return [choice.uid for choice in mine]
        finished = self._requests.finished(uid)
        if finished is not None and stop.reaches(finished[1]):
            receipt.matched(uid, finished[0].value)
            receipt.already += 1
            return []
        receipt.unmatched(uid)
        if uid not in self._requests:
            self._requests.bury(uid, stop, composing.now)
        return []

    def _choice(self, choice: Choice, stop: Stop, receipt: Receipt, composing: Composing) -> None:
        mark = choice.mark
        if mark is not None and any(known.stop_id == stop.stop_id for known in mark.stops):
            return
        receipt.matched(choice.uid, outcome_of(stop.reason).value)
        mark = mark or self._mark(choice, stop.reason, composing)
        if mark is not None:
            mark.stops.append(stop)
            receipt.marked += 1
            return
        rid, discarded = self._endings.end(choice, stop.reason, composing)
        receipt.tokens_discarded += discarded
        if rid:
            composing.entry(stop).rids.append(rid)

    # --- stops that take effect later ----------------------------------------------------

    def _mark(self, choice: Choice, reason: Reason, composing: Composing) -> Mark | None:
        """Note that a request is to end when its policy says so; ``None``: at once."""
        policy, replica = self._policy, self._replica
        effect = effect_on(policy.effects, choice)
        if effect is Effect.AT_ONCE:
            return None
        if effect is Effect.ONE_TOKEN:
            self._grammars.leave(choice, composing.turn)
            choice.grammar = 0
            choice.tokens = choice.tokens[:1]
            choice.prompt_len = 1
            choice.move(Life.READY)
            self._schedule.queue([choice])
        seq = choice.seq
        flying = seq is not None and seq.last_step > replica.processed
        choice.mark = Mark(
            effect,
            reason,
            None if policy.delivers_marked else choice.output_len,
            replica.turn + 1,
            replica.step,
            seq.last_step if seq is not None and flying else 0,
        )
        self._endings.marked[choice.key] = choice
        composing.marks = True
        return choice.mark

    def sweep(self, mode: Mode, composing: Composing) -> None:
        """End whom a stop has found and who can end now.

        Where no step will come to wait for, nobody waits.
        """
        for choice in list(self._endings.marked.values()):
            mark = choice.mark
            assert mark is not None
            stuck = mode is Mode.FROZEN or (
                mode in (Mode.ABORTED, Mode.WAITING) and choice.seq is None
            )
            if stuck or is_due(mark, choice, self._replica, composing.turn.number):
                self._endings.end(choice, mark.reason, composing)

    def close(self, composing: Composing) -> list[StopApplied]:
        """What the stops of this turn have done."""
        applied = []
        for entry in composing.turn.stops:
            done = stop_applied(entry.stop_id, entry.traceparent, entry.rids, composing.drops)
            self._receipts.effective(composing.turn.number, done)
            applied.append(done)
        return applied
