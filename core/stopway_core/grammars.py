"""Which grammars are compiled, into which slots, and who waits for them. On the leader only.

A grammar is compiled once for all who ask for the same text, off-queue, by the rank that samples.
Until that has reported, the slot is held by the compilation, whether or not anybody still wants
it; then by the cache, and by each request that runs with it.

Nobody can have it all: slots are given by priority, and among equals to the tenants in turn. One
tenant's grammars leave a quarter of the slots to the others, and no more of its texts than that
may wait for one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from stopway_core.events import Refused
from stopway_core.ledger import GRAMMARS
from stopway_core.replica import Replica
from stopway_core.requests import Choice
from stopway_core.turn import Compile, Turn
from stopway_core.types import Submission

QUARTER = 4


class _Grammar:
    __slots__ = ("priority", "ready", "slot", "tenant", "text", "users")

    def __init__(self, submission: Submission) -> None:
        self.text = submission.grammar
        self.tenant = submission.tenant  # who asked first
        self.priority = submission.priority
        self.slot = 0
        self.ready = False
        self.users: dict[int, Choice] = {}  # by key; alive, in whatever state


_Line = OrderedDict[str, _Grammar]  # by text


class GrammarBook:
    """Grammars by text, bounded by the slots of the replicas."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        slots = replica.ledger.pools[GRAMMARS].total
        self._slots_max = slots - slots // QUARTER
        self._waiting_max = max(1, slots // QUARTER)
        self._by_text: dict[str, _Grammar] = {}
        self._by_slot: dict[int, _Grammar] = {}
        self._unused: OrderedDict[int, _Grammar] = OrderedDict()  # ready; the longest first
        # Those without a slot, by (priority, tenant); the one that was served last is the last.
        self._lines: OrderedDict[tuple[int, str], _Line] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # texts without a slot, by tenant
        self._held: Counter[str] = Counter()  # slots that are in use, by tenant

    def refusal(self, submission: Submission) -> Refused | None:
        """Why a submission can't wait for its grammar; ``None`` when it can, or has none."""
        text, tenant = submission.grammar, submission.tenant
        if not text or text in self._by_text or self._waiting[tenant] < self._waiting_max:
            return None
        return Refused(
            submission.uid,
            429,
            "grammars_full",
            f"{self._waiting[tenant]} grammars of yours wait to be compiled; try later, or use "
            "fewer different ones",
        )

    def join(self, choice: Choice, turn: Turn) -> bool:
        """A choice wants its grammar; True when it is there already."""
        submission = choice.submission
        grammar = self._by_text.get(submission.grammar)
        if grammar is None:
            grammar = self._by_text[submission.grammar] = _Grammar(submission)
            self._queue(grammar)
        if grammar.ready and not grammar.users:
            del self._unused[grammar.slot]
            self._held[grammar.tenant] += 1
        elif not grammar.slot and submission.priority < grammar.priority:
            self._unqueue(grammar)
            grammar.priority = submission.priority
            self._queue(grammar)
        grammar.users[choice.key] = choice
        choice.grammar = grammar.slot
        self._start(turn)
        return grammar.ready

    def leave(self, choice: Choice, turn: Turn) -> None:
        """A choice has ended."""
        grammar = self._by_text.get(choice.submission.grammar)
        if grammar is None or grammar.users.pop(choice.key, None) is None or grammar.users:
            return
        if not grammar.slot:
            self._unqueue(grammar)
            del self._by_text[grammar.text]
        elif grammar.ready:
            self._release(grammar)
            self._start(turn)

    def compiled(self, slot: int, turn: Turn) -> list[Choice]:
        """A grammar is ready; returns who waited for it."""
        grammar = self._by_slot[slot]
        grammar.ready = True
        self._replica.compiled(slot)
        turn.compiled.append(slot)
        if not grammar.users:
            self._release(grammar)
        self._start(turn)
        return list(grammar.users.values())

    def failed(self, slot: int, turn: Turn) -> list[Choice]:
        """A grammar can't be compiled; returns who waited for it: they are to end."""
        grammar = self._by_slot[slot]
        users = list(grammar.users.values())
        grammar.users.clear()
        self._less(self._held, grammar.tenant)
        self._forget(grammar, turn)
        self._start(turn)
        return users

    # --- slots ---------------------------------------------------------------------------

    def _start(self, turn: Turn) -> None:
        """Give slots to those without, while there are any to be had."""
        pool = self._replica.ledger.pools[GRAMMARS]
        while (grammar := self._next()) is not None:
            if not pool.free:
                if not self._unused:
                    return
                # Followers forget all of a turn before they take any: the same, as the slots that
                # come free are taken in the order in which they came.
                self._forget(self._unused.popitem(last=False)[1], turn)
            line = (grammar.priority, grammar.tenant)
            self._unqueue(grammar)
            if line in self._lines:
                self._lines.move_to_end(line)
            self._held[grammar.tenant] += 1
            grammar.slot = self._replica.compile()
            self._by_slot[grammar.slot] = grammar
            for choice in grammar.users.values():
                choice.grammar = grammar.slot
            turn.compiles.append(Compile(grammar.slot, grammar.text))

    def _next(self) -> _Grammar | None:
        """Whose turn it is: by priority, then the tenant that was served longest ago."""
        able = (key for key in self._lines if self._held[key[1]] < self._slots_max)
        key = min(able, key=lambda key: key[0], default=None)  # the first of equals
        return None if key is None else next(iter(self._lines[key].values()))

    def _queue(self, grammar: _Grammar) -> None:
        line = self._lines.setdefault((grammar.priority, grammar.tenant), OrderedDict())
        line[grammar.text] = grammar
        self._waiting[grammar.tenant] += 1

    def _unqueue(self, grammar: _Grammar) -> None:
        key = grammar.priority, grammar.tenant
        line = self._lines[key]
        del line[grammar.text]
        if not line:
            del self._lines[key]
        self._less(self._waiting, grammar.tenant)

    def _release(self, grammar: _Grammar) -> None:
        """Nobody runs with it any more; it stays until its slot is wanted."""
        self._less(self._held, grammar.tenant)
        self._unused[grammar.slot] = grammar

    def _forget(self, grammar: _Grammar, turn: Turn) -> None:
        self._replica.forget(grammar.slot)
        turn.forgets.append(grammar.slot)
        del self._by_slot[grammar.slot]
        del self._by_text[grammar.text]

    @staticmethod
    def _less(counts: Counter[str], tenant: str) -> None:
        counts[tenant] -= 1
        if not counts[tenant]:
            del counts[tenant]  # tenants come and go
