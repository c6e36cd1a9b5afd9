"""The leader's requests: choices alive, by uid, tenant and conversation; and the dead, for a while.

A stop may come before its request (a tombstone waits for it) and after it (the outcome is still
known). Both memories are bounded, by time and by number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from stopway_core import names
from stopway_core.drafts import Drafter
from stopway_core.lifecycle import Event, State, after
from stopway_core.sequence import Seq
from stopway_core.types import Outcome, SamplingParams, Stop, Submission, covers

if TYPE_CHECKING:
    from stopway_core.marks import Mark

V = TypeVar("V")

MEMORY_MAX = 200_000


def params_of(submission: Submission, index: int) -> SamplingParams:
    """The parameters of one choice: each has a seed of its own, or they would all say the same."""
    params = submission.params
    if index:
        params = replace(params, seed=(params.seed + index) % (1 << 63))
    if submission.grammar and params.min_tokens:
        params = replace(params, min_tokens=0)  # the grammar alone says when it may end
    return params


class Choice:
    """One choice of one submission, from acceptance to its outcome."""

    __slots__ = (
        "accepted_tokens",
        "admitted_at",
        "arrival",
        "cached_tokens",
        "drafted_tokens",
        "drafter",
        "enders",
        "first_token_at",
        "fork",
        "grammar",
        "index",
        "key",
        "length_max",
        "mark",
        "params",
        "preemptions",
        "priority",
        "prompt_len",
        "queued_at",
        "ready_at",
        "rid",
        "seq",
        "stale_step",
        "state",
        "submission",
        "tokens",
        "uid",
        "wasted_tokens",
    )

    def __init__(
        self, key: int, submission: Submission, index: int, now: float, length_max: int
    ) -> None:
        self.key = key
        self.submission = submission
        self.index = index
        many = submission.choices > 1
        self.uid = names.child_uid(submission.uid, index) if many else submission.uid
        self.priority = submission.priority
        self.state = State.COMPILING if submission.grammar else State.QUEUED
        self.tokens = list(submission.prompt)
        self.prompt_len = len(submission.prompt)
        self.length_max = length_max
        self.params = params_of(submission, index)
        self.enders: frozenset[int] = frozenset()
        self.rid = 0  # of the current admission
        self.seq: Seq | None = None
        self.arrival = key
        self.queued_at = now
        self.ready_at = 0.0 if submission.grammar else now
        self.admitted_at = 0.0
        self.first_token_at = 0.0
        self.cached_tokens = 0
        self.preemptions = 0
        self.wasted_tokens = 0  # sampled for it and thrown away by preemptions
        self.grammar = 0  # slot of its grammar
        self.fork = 0  # rid of the sibling whose prompt it may share
        self.mark: Mark | None = None
        self.stale_step = 0  # newest in flight with it when it was preempted
        self.drafter: Drafter | None = None
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def move(self, event: Event) -> None:
        """Take the transition of the lifecycle table. Raises ``IllegalTransition``."""
        self.state = after(self.state, event)


class _Memory(Generic[V]):
    """Recent entries by key: forgotten after a time, or when there are too many."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()

    def put(self, key: str, value: V, now: float) -> None:
        self._entries[key] = (now + self._age_s, value)
        self._entries.move_to_end(key)
        if len(self._entries) > MEMORY_MAX:
            self._entries.popitem(last=False)

    def get(self, key: str) -> V | None:
        found = self._entries.get(key)
        return None if found is None else found[1]

    def expire(self, now: float) -> None:
        entries = self._entries
        while entries:
            key, (until, _) = next(iter(entries.items()))
            if until > now:
                return
            del entries[key]


def _grave(uid: str, tenant: str) -> str:
    return f"{uid}\n{tenant}"


class RequestTable:
    """Who is alive on this leader, and who was a moment ago."""

    def __init__(self, memory_s: float) -> None:
        self.by_key: dict[int, Choice] = {}
        self._by_uid: dict[str, list[Choice]] = {}  # of the request, and of each choice
        self._finished: _Memory[tuple[Outcome, str]] = _Memory(memory_s)  # (outcome, tenant)
        # By uid and sender, so that nobody's stop can displace another tenant's.
        self._tombstones: _Memory[Stop] = _Memory(memory_s)

    def __contains__(self, uid: str) -> bool:
        return uid in self._by_uid

    def add(self, choices: list[Choice]) -> None:
        """Record all choices of one request."""
        for choice in choices:
            self.by_key[choice.key] = choice
            self._by_uid[choice.uid] = [choice]
        self._by_uid[choices[0].submission.uid] = choices

    def remove(self, choice: Choice, outcome: Outcome, now: float) -> None:
        """Record the outcome of a choice; the request is finished with its last choice."""
        tenant = choice.submission.tenant
        del self.by_key[choice.key]
        if choice.submission.choices > 1:
            del self._by_uid[choice.uid]
            self._finished.put(choice.uid, (outcome, tenant), now)
        uid = choice.submission.uid
        left = [c for c in self._by_uid[uid] if c.state is not State.ENDED]
        if left:
            self._by_uid[uid] = left
        else:
            del self._by_uid[uid]
            self._finished.put(uid, (outcome, tenant), now)

    def live(self, uid: str) -> list[Choice]:
        return list(self._by_uid.get(uid, ()))

    def finished(self, uid: str) -> tuple[Outcome, str] | None:
        return self._finished.get(uid)

    def bury(self, uid: str, stop: Stop, now: float) -> None:
        """Remember a stop for a request that has not come yet."""
        self._tombstones.put(_grave(uid, "" if stop.admin else stop.tenant), stop, now)

    def tombstone(self, uid: str, tenant: str) -> Stop | None:
        """The stop that waited for this request or choice, if its sender may stop it."""
        return self._tombstones.get(_grave(uid, tenant)) or self._tombstones.get(_grave(uid, ""))

    def select(self, stop: Stop) -> Iterator[Choice]:
        """The living choices that a selector covers, oldest first."""
        for choice in list(self.by_key.values()):
            submission = choice.submission
            if not stop.reaches(submission.tenant):
                continue
            if not covers(stop, submission.uid, submission.minted_at):
                continue
            if stop.target.selects(submission.tenant, submission.conversation):
                yield choice

    def of_gateway(self, gateway: str) -> list[Choice]:
        """The living choices that one gateway asked for, oldest first."""
        return [c for c in self.by_key.values() if c.submission.gateway == gateway]

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        self._finished.expire(now)
        self._tombstones.expire(now)
