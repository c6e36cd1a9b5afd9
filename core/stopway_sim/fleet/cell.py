"""One cell: a group, or a pair for prefill and decode, with its clients and their gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stopway_core.events import Ended, Refused
from stopway_core.types import Outcome, Reason, SamplingParams, Submission, outcome_of
from stopway_sim.fleet.clients import ClosedLoop, GivingUp
from stopway_sim.fleet.config import DISPATCH_WAIT_S, FleetConfig, RankLost
from stopway_sim.fleet.events import START_S, Events
from stopway_sim.fleet.group import SimGroup
from stopway_sim.fleet.host_loads import HostLoader
from stopway_sim.fleet.outside import Outside
from stopway_sim.fleet.request import Request
from stopway_sim.fleet.tally import Level, Tally
from stopway_sim.fleet.transfer import Transfers
from stopway_sim.fleet.workload import Drawer, Spec, Texts, Workload

TENANT = "sim"


class Cell:
    """Runs the requests that were routed here to their ends."""

    def __init__(self, index: int, config: FleetConfig, workload: Workload, seed: int) -> None:
        self.config = config
        self.workload = workload
        self.events = Events()
        self.tally = Tally()
        self.texts = Texts(seed)
        self.requests: dict[int, Request] = {}
        self.alive: dict[int, Request] = {}
        self.to_come = 0
        self.outside = Outside.of(config.policy)
        first, count = (2 * index, 2) if config.split else (index, 1)
        self.groups = [
            SimGroup(first + i, config, self.outside, self.events, self, self.tally)
            for i in range(count)
        ]
        self.giving_up = GivingUp(self)
        self.closed = ClosedLoop(self, Drawer(workload, seed, config.cost.max_model_len), index)
        self.transfers = Transfers(self) if config.split else None
        self._loader = HostLoader(self, seed, index)

    def run(self, specs: Sequence[Spec]) -> Tally:
        """Simulate until nothing is left to happen; ``specs`` is empty for a closed loop."""
        events, mine = self.events, {group.index for group in self.groups}
        self.to_come = len(specs)
        for fault in self.config.faults:
            if fault.group in mine:
                events.at(START_S + fault.at_s, self._lose, fault)
        for spec in specs:
            events.at(START_S + spec.arrival_s, self.arrive, spec)
        self.closed.begin()
        self.giving_up.begin()
        self._loader.begin()
        events.run()
        for group in self.groups:
            group.close()
        return self.tally

    @property
    def busy(self) -> bool:
        """Whether a request lives or is still to come."""
        return bool(self.alive or self.to_come)

    # --- arrivals ------------------------------------------------------------------------

    def arrive(self, spec: Spec) -> None:
        """A client sends its request; its gateway dispatches it at once."""
        self.to_come -= 1
        request = self.requests[spec.number] = Request(spec, self.events.now)
        self.alive[spec.number] = request
        self.tally.counts["choices"] += spec.choices
        self.giving_up.arrived(request)
        self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        if request.ended:
            return
        now, group = self.events.now, self.groups[0]
        back_at = max(each.down_until for each in self.groups)
        if back_at > now:
            if back_at - request.sent_at > DISPATCH_WAIT_S:
                at = request.sent_at + DISPATCH_WAIT_S
                self.events.at(at, self.finish, request, Reason.RANK_LOST)
            else:
                self.events.at(back_at, self._dispatch, request)
            return
        spec = request.spec
        max_tokens = 1 if self.transfers else spec.output
        group.submit(self.submission(request, self.texts.prompt(spec), max_tokens))

    def submission(self, request: Request, prompt: tuple[int, ...], max_tokens: int) -> Submission:
        """What a leader gets; the answers end by their length only."""
        spec = request.spec
        seed = self.texts.request_seed(spec.number)
        return Submission(
            uid=uid_of(spec.number),
            attempt=1,
            tenant=TENANT,
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed),
            minted_at=self.events.now,
            choices=spec.choices,
            priority=spec.priority,
            deadlines=self.workload.deadlines,
        )

    # --- what groups say -----------------------------------------------------------------

    def of(self, number: int) -> Request:
        """The request with this number."""
        return self.requests[number]

    def admitted(self, request: Request, cached_tokens: int) -> None:
        """An answer entered a replica, where so much of the prompt was cached."""
        if request.admitted:
            return
        request.admitted = True
        spec, counts = request.spec, self.tally.counts
        counts["cache_hits"] += cached_tokens
        parent = self.requests.get(spec.parent)
        if parent is not None and parent.effective_at:
            counts["cache_hits_after_stop"] += max(0, cached_tokens - spec.prefix_tokens)

    def preempted(self, request: Request) -> None:
        """An answer left a replica, to come back."""
        self.tally.counts["preemptions"] += 1
        self.level(request).preemptions += 1

    def ended(self, group: SimGroup, ended: Ended) -> None:
        """A leader gave an answer (or a leg of it) its outcome."""
        request = self.requests[number_in(ended.uid)]
        if request.ended:
            return
        first = group is self.groups[0]
        answer, at = request.answers[ended.index], ended.first_token_at
        answer.output = ended.keep + (0 if first else request.first_leg)
        if first and at:
            request.first_token_at = min(at, request.first_token_at or at)
        more = request.spec.output > 1 and ended.outcome is Outcome.FINISHED
        if self.transfers and first and more:
            self._has_first_token(request)
            request.first_leg = ended.keep
            self.transfers.begin(request)
            return
        answer.ended = True
        request.discarded += ended.discarded_tokens
        reason = request.has_end(ended.reason)
        if reason is not None:
            if first:
                self._has_first_token(request)
            self.finish(request, reason)

    def _has_first_token(self, request: Request) -> None:
        if request.first_token_at:
            seconds = request.first_token_at - request.sent_at + self.delivery_s
            self.tally.series["first_token"].append(seconds)
            self.level(request).first_token.append(seconds)

    def level(self, request: Request) -> Level:
        """What is counted of all requests of its priority."""
        return self.tally.levels[request.spec.priority]

    def refused(self, group: SimGroup, refused: Refused) -> None:
        """A leader did not take a request."""
        request = self.requests[number_in(refused.uid)]
        if not request.ended:
            self._close(request, "refused", f"refused_{refused.code}")

    def noticed(self, number: int) -> None:
        """A stop has reached a leader."""
        self.giving_up.noticed(self.requests[number])

    def receipt(self, receipt: dict[str, Any]) -> None:
        """A stop's receipt has reached its last status on a group."""
        self.giving_up.receipt(self.requests[int(receipt["stop_id"][1:])], receipt)

    def reached(self, request: Request) -> None:
        """The tokens after which its client gives up are there; the client sees them later."""
        self.events.at(self.events.now + self.delivery_s, self.giving_up.act, request)

    @property
    def delivery_s(self) -> float:
        """From a leader's turn to the client."""
        return self.config.cost.detokenize_s + self.config.cost.gateway_s

    # --- ends ----------------------------------------------------------------------------

    def finish(self, request: Request, reason: Reason) -> None:
        """Give a request its one outcome, now."""
        if request.ended:
            return
        counts, outcome = self.tally.counts, outcome_of(reason)
        made = request.produced
        delivered = min(made, request.delivered_at_act) if request.acted_at else made
        counts["delivered"] += delivered
        counts["thrown_away"] += made - delivered + request.discarded
        if request.acted_at:
            counts["prefill_thrown_away"] += request.prefilled - request.prefill_at_act
        elif outcome is Outcome.FINISHED:
            counts["good"] += delivered
            total = self.events.now + self.delivery_s - request.sent_at
            self.tally.series["total"].append(total)
        self.giving_up.ended(request, reason)
        self._close(request, outcome.value, reason.value)

    def _close(self, request: Request, outcome: str, reason: str) -> None:
        request.ended = True
        del self.alive[request.spec.number]
        self.tally.outcomes[outcome] += 1
        self.tally.reasons[reason] += 1
        level = self.level(request)
        level.requests += 1
        level.finished += outcome == Outcome.FINISHED.value
        self.tally.last_end_s = self.events.now - START_S
        if not request.acted_at:
            self.closed.next(request.spec, self.events.now + self.delivery_s)

    def _lose(self, fault: RankLost) -> None:
        """A rank dies: what the group had fails (the gateway retries nothing)."""
        for request in list(self.alive.values()):
            if self._on(request, fault.group):
                for answer in request.answers:
                    answer.leave()
                self.finish(request, Reason.RANK_LOST)
        for group in self.groups:
            if group.index == fault.group:
                group.lose(self.events.now + fault.down_s)
        if self.transfers:
            self.transfers.lost()

    def _on(self, request: Request, group: int) -> bool:
        """Whether losing ``group`` loses the request; a transfer needs both."""
        if not self.transfers or request.transferring:
            return True
        return (group % 2 == 1) == bool(request.first_leg)


def uid_of(number: int) -> str:
    """A request's uid."""
    return f"r{number}"


def number_in(uid: str) -> int:
    """The number of a request in its uid, or in that of one of its choices."""
    return int(uid[1:].partition(".")[0])
