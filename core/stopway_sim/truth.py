"""What must be so, kept by somebody who only watches: outcomes, tokens, receipts.

It knows nothing of blocks or queues: each delivered token must be the one that the undisturbed
greedy run of the same prompt has there, each key ends once, each receipt says what is so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stopway_core.events import Ended, Event, StopSignal
from stopway_core.planner import Planned
from stopway_core.types import Reason, Stop, Submission
from stopway_sim.failure import require
from stopway_sim.group import Group, GroupShape
from stopway_sim.model import Solo


def covers(stop: Stop, submission: Submission) -> bool:
    """Whether a stop is aimed at a request, or at a choice of it, by somebody who may."""
    target = stop.target
    if not (stop.admin or stop.tenant == submission.tenant):
        return False
    return (
        target.everything
        or submission.uid in target.uids
        or (target.tenant != "" and target.tenant == submission.tenant)
        or (target.conversation != "" and target.conversation == submission.conversation)
    )


_ORDER = {"noticed": 1, "stopped": 2, "reclaimed": 3, "already_finished": 3}
_BY_TIME = {
    Reason.DEADLINE_QUEUE: "queue",
    Reason.DEADLINE_TTFT: "first_token",
    Reason.DEADLINE_TOTAL: "total",
}


class SoloRuns:
    """Undisturbed runs by prompt."""

    def __init__(self, shape: GroupShape) -> None:
        self._shape = shape
        self._runs: dict[tuple[int, ...], Solo] = {}

    def of(self, prompt: tuple[int, ...]) -> Solo:
        run = self._runs.get(prompt)
        if run is None:
            shape = self._shape
            run = self._runs[prompt] = Solo(prompt, shape.tensor, shape.pipeline, shape.vocab)
        return run


@dataclass(slots=True)
class Watched:
    """One choice in one epoch."""

    key: int
    index: int
    submission: Submission
    delivered: list[int] = field(default_factory=list)
    sampled: int = 0  # rows launched for it that sample
    ended: Ended | None = None


class Truth:
    """Everything that one epoch's leader said, checked as it says it."""

    def __init__(self, group: Group, solos: SoloRuns, coverage: Counter[str]) -> None:
        self.group = group
        self.by_key: dict[int, Watched] = {}
        self.keys: dict[str, tuple[int, ...]] = {}
        self._solos = solos
        self._coverage = coverage
        self._submissions: dict[str, Submission] = {}
        self._key_of_rid: dict[int, int] = {}
        self._stopped_rids: dict[str, set[int]] = {}
        self._turn_of_stop: dict[str, int] = {}
        self.status: dict[str, str] = {}  # of each stop, as last published
        self._states: dict[int, str] = {}
        self._stops: dict[str, Stop] = {}
        self._must_end: list[tuple[Watched, Stop]] = []  # in this turn

    def submitted(self, submission: Submission) -> None:
        """A submission is about to reach the planner."""
        self._submissions[submission.uid] = submission

    def before_turn(self, events: Sequence[Event] = ()) -> None:
        """Note where everybody is, for the coverage of what stops whom, and who must end."""
        self._must_end = []
        for event in events:
            if isinstance(event, StopSignal) and event.stop.stop_id not in self._stops:
                stop = self._stops[event.stop.stop_id] = event.stop
                for watched in self.by_key.values():
                    if watched.ended is None and covers(stop, watched.submission):
                        self._must_end.append((watched, stop))
        self._states = {
            key: "preempted" if choice.preemptions and choice.seq is None else choice.state.value
            for key, choice in self.group.planner.requests.by_key.items()
        }

    def after_turn(self, planned: Planned, now: float) -> None:
        """Check one turn of the leader."""
        turn, outputs = planned.turn, planned.outputs
        for accepted in outputs.accepted:
            require(accepted.uid not in self.keys, f"{accepted.uid} is accepted twice")
            self.keys[accepted.uid] = accepted.keys
            submission = self._submissions[accepted.uid]
            require(len(accepted.keys) == submission.choices, f"{accepted.uid}: choices missing")
            for index, key in enumerate(accepted.keys):
                require(key not in self.by_key, f"key {key} is used twice")
                self.by_key[key] = Watched(key, index, submission)
        for refused in outputs.refused:
            self._coverage[f"refused {refused.code}"] += 1
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            self._token(self.by_key[key], token)
        for ended in outputs.ended:
            self._end(self.by_key[ended.key], ended, now)
        for watched, signal in self._must_end:
            require(watched.ended is not None, f"{signal} ended nothing of {watched.submission}")
        for accepted in outputs.accepted:
            for signal in self._stops.values():
                if accepted.uid in signal.target.uids and covers(
                    signal, self._submissions[accepted.uid]
                ):
                    alive = [key for key in accepted.keys if self.by_key[key].ended is None]
                    require(not alive, f"{accepted.uid} lives although {signal} came before it")
        for stop in turn.stops:
            self._stopped_rids.setdefault(stop.stop_id, set()).update(stop.rids)
            self._turn_of_stop[stop.stop_id] = turn.number
        self._launches(planned)

    def _launches(self, planned: Planned) -> None:
        turn = planned.turn
        self._coverage["turns"] += 1
        self._coverage["preemptions"] += len(turn.preempts)
        if turn.admits:
            chosen = {c.rid: c for c in self.group.planner.requests.by_key.values()}
            for admit in turn.admits:
                self._key_of_rid[admit.rid] = chosen[admit.rid].key
                seq = chosen[admit.rid].seq
                self._coverage["prefix cache hits"] += bool(seq is not None and seq.cached_tokens)
        if planned.work is None:
            return
        tokens = sum(len(row.tokens) for row in planned.work.rows)
        bound = self.group.planner.config.max_batch_tokens
        require(tokens <= bound, f"a step of {tokens} tokens; the bound is {bound}")
        for row in planned.work.rows:
            watched = self.by_key[self._key_of_rid[row.rid]]
            require(watched.ended is None, f"{watched.submission.uid} runs after its end")
            watched.sampled += row.sample
            self._coverage["prefill chunks"] += not row.sample

    def _token(self, watched: Watched, token: int) -> None:
        name = f"{watched.submission.uid}[{watched.index}]"
        require(watched.ended is None, f"{name}: a token after its end")
        at = len(watched.delivered)
        watched.delivered.append(token)
        expected = self._solos.of(watched.submission.prompt).output(at + 1)[at]
        require(
            token == expected,
            f"{name}: token {at} is {token}, its undisturbed run has {expected} there",
        )

    def _end(self, watched: Watched, ended: Ended, now: float) -> None:
        submission, reason = watched.submission, ended.reason
        name = f"{submission.uid}[{watched.index}]"
        require(watched.ended is None, f"{name}: two outcomes")
        watched.ended = ended
        state = self._states.get(ended.key, "unborn")
        self._coverage[f"end {state} x {reason.value}"] += 1
        require(ended.keep <= len(watched.delivered), f"{name}: keeps what it did not have")
        require(
            ended.keep + ended.discarded_tokens == watched.sampled,
            f"{name}: {ended.keep} kept + {ended.discarded_tokens} discarded is not "
            f"{watched.sampled} sampled",
        )
        params = submission.params
        enders = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
        kept = watched.delivered[: ended.keep]
        ends_at = [i + 1 for i, t in enumerate(kept) if t in enders and i + 1 >= params.min_tokens]
        shape = self.group.shape
        longest = min(self.group.planner.config.max_model_len, shape.blocks * shape.block_size)
        length = min(params.max_tokens, longest - len(submission.prompt))
        if reason is Reason.EOS:
            require(ends_at == [ended.keep], f"{name}: ended by {kept}, not at its first end token")
        else:
            require(not ends_at, f"{name}: went past an end token: {kept}")
        if reason is Reason.LENGTH:
            require(ended.keep == length, f"{name}: {ended.keep} tokens, not {length}")
        if reason in _BY_TIME:
            seconds = getattr(submission.deadlines, _BY_TIME[reason])
            require(
                seconds is not None and now >= ended.queued_at + seconds,
                f"{name}: {reason.value} before its time",
            )

    def receipt(self, receipt: dict[str, Any]) -> None:
        """Check one published receipt against what is so on every rank."""
        stop_id, status = receipt["stop_id"], receipt["status"]
        name = f"receipt {stop_id} ({status})"
        before = self.status.get(stop_id)
        again = before is not None and _ORDER[status] < _ORDER[before]
        require(not again or receipt["status"] == "noticed", f"{name} after {before}")
        self.status[stop_id] = status
        ranks = receipt["ranks"]
        require(len(ranks) == len(self.group.ranks), f"{name} lacks a rank")
        require(sum(receipt["outcome"].values()) == receipt["count"], f"{name}: counts differ")
        require(min(receipt["outcome"].values()) >= 0, f"{name}: a negative count")
        require(len(receipt["request_ids"]) == min(receipt["count"], 100), f"{name}: ids missing")
        if status == "already_finished":
            self._coverage["stops of the finished"] += 1
            return
        if receipt["outcome"]["unknown"]:
            self._coverage["stops of the unknown"] += 1
        require((status == "reclaimed") == (not receipt["pending_on"]), f"{name}: pending_on")
        if status == "reclaimed":
            self._reclaimed(name, stop_id, receipt)

    def _reclaimed(self, name: str, stop_id: str, receipt: dict[str, Any]) -> None:
        rids = self._stopped_rids[stop_id]
        for rank, part in zip(self.group.ranks, receipt["ranks"], strict=True):
            where = f"{name}, rank {rank.rank}"
            applied = rank.replica.turn >= self._turn_of_stop[stop_id]
            require(applied, f"{where}: its turn is not applied")
            require(rids.isdisjoint(rank.replica.seqs), f"{where}: a request still runs")
            for work in rank.queue:
                mine = rids.intersection(row.rid for row in work.rows)
                require(not mine, f"{where}: step {work.step} has yet to run for {mine}")
            times = (part["noticed_at"], part["stopped_at"], part["reclaimed_at"])
            require(None not in times, f"{where}: a time is missing")
            require(times[0] <= times[1] <= times[2], f"{where}: times out of order {times}")

    def finish(self) -> None:
        """The epoch is over in peace: everybody has an outcome, every stop its last status."""
        for watched in self.by_key.values():
            name = f"{watched.submission.uid}[{watched.index}]"
            require(watched.ended is not None, f"{name} has no outcome")
        for stop_id, status in self.status.items():
            require(_ORDER[status] == 3, f"stop {stop_id} is left {status}")
        self.group.check_idle()
