"""Which grammars are compiled, into which slots, and who waits for them. On the leader only.

A grammar is compiled once for all who ask for the same text, off-queue, by the rank that samples.
Until that has reported, the slot is held by the compilation, whether or not anybody still wants
it; then by the cache, and by each request that runs with it.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from stopway_core.ledger import GRAMMARS
from stopway_core.replica import Replica
from stopway_core.requests import Choice
from stopway_core.turn import Compile, Turn


class _Grammar:
    __slots__ = ("ready", "slot", "text", "users")

    def __init__(self, text: str) -> None:
        self.text = text
        self.slot = 0
        self.ready = False
        self.users: dict[int, Choice] = {}  # by key; alive, in whatever state


class GrammarBook:
    """Grammars by text, bounded by the slots of the replicas."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._by_text: OrderedDict[str, _Grammar] = OrderedDict()  # least recently asked for first
        self._by_slot: dict[int, _Grammar] = {}
        self._unslotted: deque[_Grammar] = deque()  # all slots are in use

    def join(self, choice: Choice, turn: Turn) -> bool:
        """A choice wants its grammar; True when it is there already."""
        text = choice.submission.grammar
        grammar = self._by_text.get(text)
        if grammar is None:
            grammar = self._by_text[text] = _Grammar(text)
            self._unslotted.append(grammar)
        self._by_text.move_to_end(text)
        grammar.users[choice.key] = choice
        choice.grammar = grammar.slot
        if not grammar.slot:
            self._start(turn)
        return grammar.ready

    def leave(self, choice: Choice, turn: Turn) -> None:
        """A choice has ended."""
        grammar = self._by_text.get(choice.submission.grammar)
        if grammar is None:
            return
        grammar.users.pop(choice.key, None)
        if not grammar.users and not grammar.slot:
            self._unslotted.remove(grammar)
            del self._by_text[grammar.text]
        elif self._unslotted:
            self._start(turn)

    def compiled(self, slot: int, turn: Turn) -> list[Choice]:
        """A grammar is ready; returns who waited for it."""
        grammar = self._by_slot[slot]
        grammar.ready = True
        self._replica.compiled(slot)
        turn.compiled.append(slot)
        self._start(turn)
        return list(grammar.users.values())

    def failed(self, slot: int, turn: Turn) -> list[Choice]:
        """A grammar can't be compiled; returns who waited for it: they are to end."""
        grammar = self._by_slot[slot]
        users = list(grammar.users.values())
        grammar.users.clear()
        self._forget(grammar, turn)
        self._start(turn)
        return users

    def _start(self, turn: Turn) -> None:
        """Give slots to those without, in the order of asking, while there are any to be had."""
        pool = self._replica.ledger.pools[GRAMMARS]
        while self._unslotted:
            if not pool.free:
                # Followers forget all of a turn before they take any: the same, as the slots that
                # come free are taken in the order in which they came.
                unused = next((g for g in self._by_text.values() if g.ready and not g.users), None)
                if unused is None:
                    return
                self._forget(unused, turn)
            grammar = self._unslotted.popleft()
            grammar.slot = self._replica.compile()
            self._by_slot[grammar.slot] = grammar
            for choice in grammar.users.values():
                choice.grammar = grammar.slot
            turn.compiles.append(Compile(grammar.slot, grammar.text))

    def _forget(self, grammar: _Grammar, turn: Turn) -> None:
        self._replica.forget(grammar.slot)
        turn.forgets.append(grammar.slot)
        del self._by_slot[grammar.slot]
        del self._by_text[grammar.text]
