"""What a run comes to. Every figure is defined here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stopway_sim.fleet.tally import SERIES, Level, Tally

CDF_STEPS = 50
_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Report:
    """One run. Durations in seconds, rates per second of ``makespan``.

    Cancel durations, of requests that a stop ended, all from the client's act (its cancel, or
    its going away):

    - ``detect``: until the gateway issues the stop. Counted for every act.
    - ``notify``: until a leader has the stop, when the request had not ended by then.
    - ``effective``: until the turn that ends the request.
    - ``reclaimed``: until its blocks may be used by anything, off-queue use included, as far as
      the policy goes: without a fence that is the moment of ``effective``, and unsafe.

    Others:

    - ``first_token``: from the client's request to the delivery of its first token, of requests
      that a leader has ended; ``total``: to the delivery of the last, of those that finished and
      were not given up.
    - ``makespan``: from the start of the run to the last outcome.
    - ``delivered``: tokens that clients got: all that a request kept, up to its client's act.
    - ``goodput``: delivered tokens of finished requests that were not given up, per second.
      ``throughput``: all delivered tokens, per second.
    - ``thrown_away``: tokens sampled and not delivered: after the client's act, in flight at the
      end, or lost by a preemption. ``prefill_thrown_away``: prompt tokens whose computing was
      launched after the client's act.
    - ``recomputed``: positions whose KV a preempted request had, and has to compute again, counted
      when it is admitted again. ``preemptions``: how often one left.
    - ``cache_hits``: prompt tokens found in the prefix cache at a first admission;
      ``cache_hits_after_stop``: of them, those of follow-ups, beyond the common prefix, whose
      turn before was ended by a stop.
    - ``block_seconds_after_stop``: blocks that a stop gave back x seconds from the client's act
      until they were safe for anything.
    - ``hazards``: blocks that off-queue use took while a step that may write them was in flight.
    - ``stops``: ``given_up`` requests, ``issued`` stops, ``already_finished`` when they came,
      ``too_late`` to be issued at all.
    - ``outcomes``: every request once: finished, stopped, failed, refused; ``reasons``: why. Of
      several choices the worst end counts: a failed one, then a stopped one.

    Only where a request has another priority than 0: ``priorities``, by priority, with
    ``requests``, those that ``finished``, ``preemptions`` and ``first_token_s``. Only where one
    has several choices: ``choices``, with how many were ``asked`` for, and ``shared_tokens``:
    prompt tokens that a choice took over from a running sibling. Tokens are those of all choices,
    a first token is the first of any, and a request ends with its last choice.
    """

    policy: str
    seed: int
    groups: int
    requests: int
    tally: Tally

    @property
    def makespan_s(self) -> float:
        """See ``makespan``."""
        return self.tally.last_end_s

    def rate(self, count: str) -> float:
        """A count per second of the run."""
        return self.tally.counts[count] / self.makespan_s if self.makespan_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report, with its keys in a fixed order; the same run gives the same bytes."""
        tally, counts = self.tally, self.tally.counts
        series = {name: spread(tally.series[name]) for name in SERIES}
        return {
            "policy": self.policy,
            "seed": self.seed,
            "groups": self.groups,
            "requests": self.requests,
            "makespan_s": round(self.makespan_s, _DIGITS),
            "outcomes": dict(sorted(tally.outcomes.items())),
            "reasons": dict(sorted(tally.reasons.items())),
            "stops": {
                "given_up": counts["given_up"],
                "issued": counts["stops_issued"],
                "already_finished": counts["stops_already_finished"],
                "too_late": counts["stops_too_late"],
            },
            "cancel_s": {name: series[name] for name in SERIES[2:]},
            "latency_s": {name: series[name] for name in SERIES[:2]},
            "tokens": {
                "goodput_per_s": round(self.rate("good"), _DIGITS),
                "throughput_per_s": round(self.rate("delivered"), _DIGITS),
                **{
                    name: counts[name]
                    for name in (
                        "delivered",
                        "thrown_away",
                        "prefill_thrown_away",
                        "recomputed",
                        "cache_hits",
                        "cache_hits_after_stop",
                    )
                },
            },
            "preemptions": counts["preemptions"],
            "block_seconds_after_stop": round(tally.block_seconds, _DIGITS),
            "hazards": counts["hazards"],
            "off_queue": {
                name: counts[name]
                for name in ("host_loads", "host_loads_given_up", "transfers", "transfer_retries")
            },
            "checks": {
                name: counts[name] for name in ("checked_turns", "alive_at_end", "held_at_end")
            },
            **self._if_asked(),
        }

    def _if_asked(self) -> dict[str, Any]:
        """What only some workloads have."""
        levels, counts = sorted(self.tally.levels.items()), self.tally.counts
        found: dict[str, Any] = {}
        if any(priority for priority, _ in levels):
            found["priorities"] = {str(priority): _level(level) for priority, level in levels}
        if counts["choices"] > self.requests:
            shared = counts["shared_tokens"]
            found["choices"] = {"asked": counts["choices"], "shared_tokens": shared}
        return found

    def cdfs(self) -> dict[str, list[float]]:
        """For each series ``CDF_STEPS`` + 1 evenly spaced quantiles, or an empty list."""
        return {name: quantiles(self.tally.series[name]) for name in SERIES}


def _level(level: Level) -> dict[str, Any]:
    return {
        "requests": level.requests,
        "finished": level.finished,
        "preemptions": level.preemptions,
        "first_token_s": spread(level.first_token),
    }


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Nearest-rank percentiles; ``None`` where there is nothing."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return {"p50": None, "p90": None, "p99": None, "max": None, "n": 0}
    found: dict[str, float | int | None] = {
        f"p{share}": round(ordered[max(0, -(-share * count // 100) - 1)], _DIGITS)
        for share in (50, 90, 99)
    }
    return {**found, "max": round(ordered[-1], _DIGITS), "n": count}


def quantiles(values: Sequence[float]) -> list[float]:
    """From the least to the greatest in ``CDF_STEPS`` even steps of rank."""
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    return [round(ordered[i * last // CDF_STEPS], _DIGITS) for i in range(CDF_STEPS + 1)]
