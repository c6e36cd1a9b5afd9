"""What must be so, kept by somebody who only watches: outcomes, tokens, receipts.

It knows nothing of blocks or queues: each delivered token must be the one that the undisturbed
greedy run of the same prompt has there, each key ends once, each receipt says what is so.

**The count.** A row that samples counts once, except that a row whose result was taken counts the
tokens that it gave: several where drafts were right, none where the grammar rejected. A result is
taken when its request runs, or was preempted with it in flight and is not back yet. Then, for every
request at its end: tokens kept + tokens discarded = its count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stopway_core.admission import tightest
from stopway_core.events import Ended, Event, Mode, StopSignal
from stopway_core.lifecycle import State
from stopway_core.names import child_uid
from stopway_core.planner import Planned
from stopway_core.policy import Effect, Effects
from stopway_core.turn import Admit, Sampled
from stopway_core.types import DROPPED, Reason, Stop, Submission
from stopway_sim.failure import require
from stopway_sim.group import Group, GroupShape
from stopway_sim.model import Solo
from stopway_sim.places import Place, place_of
from stopway_sim.sampling import parse


def covers(stop: Stop, submission: Submission, index: int) -> bool:
    """Whether a stop is aimed at a choice of a request, by somebody who may.

    A selector does not mean what was made after it, as far as clocks can tell.
    """
    target = stop.target
    if not (stop.admin or stop.tenant == submission.tenant):
        return False
    if not {submission.uid, child_uid(submission.uid, index)}.isdisjoint(target.uids):
        return True
    same_clock = stop.publisher.split("-")[0] == submission.gateway
    if submission.minted_at > stop.issued_at + (0.0 if same_clock else 2.0):
        return False
    return (
        target.everything
        or (target.tenant != "" and target.tenant == submission.tenant)
        or (target.conversation != "" and target.conversation == submission.conversation)
    )


_ORDER = {"noticed": 1, "stopped": 2, "reclaimed": 3, "already_finished": 3}
_BY_TIME = {
    Reason.DEADLINE_QUEUE: "queue",
    Reason.DEADLINE_TTFT: "first_token",
    Reason.DEADLINE_TOTAL: "total",
}


_RUNS_ON = (Effect.ONE_TOKEN, Effect.PREFILLED)  # marks with which a request is admitted


class SoloRuns:
    """Undisturbed runs by prompt and grammar."""

    def __init__(self, shape: GroupShape) -> None:
        self._shape = shape
        self._runs: dict[tuple[tuple[int, ...], str], Solo] = {}

    def of(self, prompt: tuple[int, ...], grammar: str = "") -> Solo:
        run = self._runs.get((prompt, grammar))
        if run is None:
            shape = self._shape
            choose = parse(grammar).choose if grammar else None
            run = Solo(prompt, shape.tensor, shape.pipeline, shape.vocab, choose)
            self._runs[prompt, grammar] = run
        return run


@dataclass(slots=True)
class Watched:
    """One choice in one epoch."""

    key: int
    index: int
    submission: Submission
    delivered: list[int] = field(default_factory=list)
    sampled: int = 0  # see "the count" above
    admissions: int = 0
    ended: Ended | None = None

    @property
    def name(self) -> str:
        return f"{self.submission.uid}[{self.index}]"


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
        self._rows: dict[int, list[tuple[Watched, int, int]]] = {}  # step -> (who, rid, samples)
        self._running: set[int] = set()  # rids when the turn began
        self._stale: set[int] = set()  # those, and the preempted whose tokens are still taken
        self._drafted = self._accepted = 0
        self._drained = False
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
                    if watched.ended is None and covers(stop, watched.submission, watched.index):
                        self._must_end.append((watched, stop))
        planner = self.group.planner
        stale = planner.config.policy.delivers_preempted
        self._running = set(planner.replica.seqs)
        self._stale = self._running | {
            choice.rid for choice in planner.requests.by_key.values() if stale and choice.rid
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
        for result in turn.results:
            self._result(result)
        planner = self.group.planner
        counted = planner.drafted_tokens, planner.accepted_tokens
        right = self._drafted, self._accepted
        require(counted == right, f"drafts are counted as {counted}, not {right}")
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            self._token(self.by_key[key], token)
        for ended in outputs.ended:
            self._end(self.by_key[ended.key], ended, now)
        if self._at_once:
            self._stopped_at_once(planned)
        for stop in turn.stops:
            self._stopped_rids.setdefault(stop.stop_id, set()).update(stop.rids)
            self._turn_of_stop[stop.stop_id] = turn.number
        self._launches(planned)

    @property
    def _at_once(self) -> bool:
        return self.group.planner.config.policy.effects == Effects()

    def _stopped_at_once(self, planned: Planned) -> None:
        """A stop takes effect in its turn, on whoever is there and whoever comes later."""
        for watched, signal in self._must_end:
            require(watched.ended is not None, f"{signal} ended nothing of {watched.submission}")
        named = [signal for signal in self._stops.values() if signal.target.uids]
        for accepted in planned.outputs.accepted:
            for watched in (self.by_key[key] for key in accepted.keys):
                for signal in named:
                    meant = covers(signal, watched.submission, watched.index)
                    lives = meant and watched.ended is None
                    require(not lives, f"{watched.name} lives although {signal} came before it")

    def _result(self, result: Sampled) -> None:
        """Count what a completed step gave."""
        at = 0
        for row, (watched, rid, samples) in enumerate(self._rows.pop(result.step)):
            count = result.counts[row] if result.counts else 1
            tokens = result.tokens[at : at + count]
            at += count
            valid = count - (tokens[-1] < 0)
            if tokens[-1] != DROPPED and samples > 1:
                self._drafted += samples - 1
                self._accepted += count - 1
            if watched.ended is None and rid in (self._stale if valid == count else self._running):
                watched.sampled += valid - 1

    def _launches(self, planned: Planned) -> None:
        turn, planner = planned.turn, self.group.planner
        self._coverage["turns"] += 1
        self._coverage["preemptions"] += len(turn.preempts)
        for admit in turn.admits:
            self._admitted(planned, admit)
        require(planner.mode is not Mode.FROZEN or turn.launch is None, "a launch while frozen")
        self._held_back(planned)
        if planned.work is None:
            return
        tokens = sum(len(row.tokens) for row in planned.work.rows)
        bound = planner.config.step_tokens
        require(tokens <= bound, f"a step of {tokens} tokens; the bound is {bound}")
        rows = self._rows[planned.work.step] = []
        for row in planned.work.rows:
            watched = self.by_key[self._key_of_rid[row.rid]]
            require(watched.ended is None, f"{watched.submission.uid} runs after its end")
            watched.sampled += bool(row.samples)
            if row.samples:
                rows.append((watched, row.rid, row.samples))
            self._coverage["prefill chunks"] += not row.samples
            self._coverage["rows with drafts"] += row.samples > 1
            self._coverage["rows from a source"] += row.source[0] > 0

    def _admitted(self, planned: Planned, admit: Admit) -> None:
        """Nobody passes those before it, and nobody starts while the queue stands still."""
        planner = self.group.planner
        choice = next(c for c in planner.requests.by_key.values() if c.rid == admit.rid)
        watched = self.by_key[choice.key]
        self._key_of_rid[admit.rid] = choice.key
        require(choice.mark is None or choice.mark.effect in _RUNS_ON, f"{choice.uid} is marked")
        self._coverage["prefix cache hits"] += bool(choice.seq and choice.seq.cached_tokens)
        self._coverage["forks"] += admit.fork > 0
        started = self._started(watched)
        watched.admissions += 1
        require(
            started or planner.mode in (Mode.RUNNING, Mode.DRAINING),
            f"{watched.name} starts while the mode is {planner.mode}",
        )
        for other in planner.requests.by_key.values():
            if other.state is not State.QUEUED or place_of(planner, other) is Place.SIBLING:
                continue
            if planner.mode is Mode.WAITING and not self._started(self.by_key[other.key]):
                continue
            # One that had started, or its heir, has a place of its own, by its policy.
            back = self._started(self.by_key[other.key])
            passed = other.priority < choice.priority or (
                other.priority == choice.priority
                and other.arrival < choice.arrival
                and not (started or back)
                # Who waited for a grammar is queued when that is ready.
                and not (choice.submission.grammar or other.submission.grammar)
            )
            require(not passed, f"{watched.name} is admitted before {other.uid}")

    def _started(self, watched: Watched) -> bool:
        """Whether any choice of a request has ever been admitted."""
        uid = watched.submission.uid
        return any(self.by_key[key].admissions for key in self.keys[uid])

    def _held_back(self, planned: Planned) -> None:
        planner = self.group.planner
        if not self.group.ranks[0].loads or planner.mode is Mode.FROZEN:
            return
        replica = planner.replica
        if planned.turn.launch is None and len(replica.in_flight) >= planner.config.window:
            return
        for seq in replica.seqs.values():
            full = seq.launched >= len(seq.blocks) * replica.block_size
            self._coverage["rows held back"] += full and not seq.pending

    def _token(self, watched: Watched, token: int) -> None:
        name, submission = watched.name, watched.submission
        require(watched.ended is None, f"{name}: a token after its end")
        at = len(watched.delivered)
        watched.delivered.append(token)
        expected = self._solos.of(submission.prompt, submission.grammar).output(at + 1)[at:]
        require(
            [token] == expected,
            f"{name}: token {at} is {token}, its undisturbed run has {expected} there",
        )

    def _end(self, watched: Watched, ended: Ended, now: float) -> None:
        name = watched.name
        require(watched.ended is None, f"{name}: two outcomes")
        watched.ended = ended
        require(ended.keep <= len(watched.delivered), f"{name}: keeps what it did not have")
        require(
            ended.keep + ended.discarded_tokens == watched.sampled,
            f"{name}: {ended.keep} kept + {ended.discarded_tokens} discarded is not "
            f"{watched.sampled} sampled",
        )
        self._why(watched, ended)
        if ended.reason is Reason.CLIENT_CANCEL:
            meant = any(
                covers(stop, watched.submission, watched.index) for stop in self._stops.values()
            )
            require(meant, f"{name}: nobody meant it")
        if ended.reason in _BY_TIME:
            limits = tightest(watched.submission.deadlines, self.group.planner.config.deadlines)
            seconds = getattr(limits, _BY_TIME[ended.reason])
            require(
                seconds is not None and now >= ended.queued_at + seconds,
                f"{name}: {ended.reason.value} before its time",
            )

    def _why(self, watched: Watched, ended: Ended) -> None:
        """The reason is the right one for the tokens kept."""
        submission, reason, name = watched.submission, ended.reason, watched.name
        params, grammar, config = submission.params, submission.grammar, self.group.planner.config
        enders = set(params.stop_token_ids)
        if grammar or not params.ignore_eos:
            enders.add(0)
        least = 0 if grammar else params.min_tokens
        kept = watched.delivered[: ended.keep]
        ends_at = [i + 1 for i, token in enumerate(kept) if token in enders and i + 1 >= least]
        if reason in (Reason.EOS, Reason.GRAMMAR_END):
            require(ends_at == [ended.keep], f"{name}: ended by {kept}, not at its first end token")
            whole = bool(grammar) and kept[-1] == 0  # else a stop token, which may come anywhere
            require((reason is Reason.GRAMMAR_END) == whole, f"{name}: {reason} with {grammar!r}")
        elif self._at_once:
            require(not ends_at, f"{name}: went past an end token: {kept}")
        else:  # a mark's reason stands whatever ends it
            require(ends_at in ([], [ended.keep]), f"{name}: went past an end token: {kept}")
        shape = self.group.shape
        longest = min(config.max_model_len, shape.blocks * shape.block_size)
        length = min(params.max_tokens, longest - len(submission.prompt))
        if reason is Reason.LENGTH:
            require(ended.keep == length, f"{name}: {ended.keep} tokens, not {length}")
        elif reason is Reason.BAD_INPUT:
            try:
                parse(grammar)
            except ValueError:
                return  # it cannot be compiled
            run = self._solos.of(submission.prompt, grammar).output(ended.keep + 1)
            require(len(run) == ended.keep, f"{name}: rejected where its grammar allows {run}")
        elif reason is Reason.PREEMPTED:
            constrained = config.policy.ends_constrained and grammar
            require(bool(constrained), f"{name} was preempted for good")

    def receipt(self, receipt: dict[str, Any]) -> None:
        """Check one published receipt against what is so on every rank."""
        stop_id, status = receipt["stop_id"], receipt["status"]
        name = f"receipt {stop_id} ({status})"
        before = self.status.get(stop_id)
        again = before is not None and _ORDER[status] < _ORDER[before]
        require(not again or receipt["status"] == "noticed", f"{name} after {before}")
        self.status[stop_id] = status
        turn = self._turn_of_stop[stop_id]
        require(receipt["turn_effective"] == turn, f"{name}: took effect in turn {turn}")
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

    def drained(self) -> None:
        """The leader lets everybody go: nothing runs on any rank, and every stop is proved."""
        self._coverage["groups drained"] += not self._drained
        self._drained = True
        step = self.group.planner.replica.step
        for rank in self.group.ranks:
            require(
                rank.executed == step,
                f"drained: rank {rank.rank} has run step {rank.executed} of {step}",
            )
        for stop_id, status in self.status.items():
            require(_ORDER[status] == 3, f"drained: stop {stop_id} is left {status}")

    def finish(self) -> None:
        """The epoch is over in peace: everybody has an outcome, every stop its last status."""
        for watched in self.by_key.values():
            name = f"{watched.submission.uid}[{watched.index}]"
            require(watched.ended is not None, f"{name} has no outcome")
        for stop_id, status in self.status.items():
            require(_ORDER[status] == 3, f"stop {stop_id} is left {status}")
        self.group.check_idle()
