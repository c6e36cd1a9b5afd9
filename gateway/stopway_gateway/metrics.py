"""The gateway's metrics, in a registry of its own. One series per group, never per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PHASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GroupLoad = tuple[str, dict[str, int]]


class Metrics:
    """Counters that the parts of the gateway count in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stop_phase = Histogram(
            "stopway_stop_phase_seconds",
            "Time from one phase of a stop to the next",
            ["phase"],
            buckets=_PHASE_BUCKETS,
            registry=self.registry,
        )
        self.stop_signals = self._counter("stopway_stop_signals", "Stops asked for", ["reason"])
        self.outcomes = self._counter(
            "stopway_request_outcomes", "Requests by how they ended", ["outcome", "reason"]
        )
        self.first_token = Histogram(
            "stopway_first_token_seconds",
            "Time from arrival to the first text",
            buckets=_PHASE_BUCKETS,
            registry=self.registry,
        )
        self.direct_stops = self._counter(
            "stopway_stop_direct", "Stops sent to a leader past Redis", ["group"]
        )
        self.stream_gaps = self._counter(
            "stopway_stop_stream_gaps", "Entries missed in a stops stream, by sequence number"
        )
        self.bad_entries = self._counter(
            "stopway_stop_bad_entries", "Entries of a stream that were malformed or not signed"
        )
        self.bus_up = Gauge(
            "stopway_stop_bus_up", "Whether Redis takes stops (1 or 0)", registry=self.registry
        )

        self._draft_tokens = self._counter(
            "stopway_draft_tokens", "Tokens guessed ahead and verified", ["group"]
        )
        self._accepted_tokens = self._counter(
            "stopway_accepted_draft_tokens", "Of them, those that were right", ["group"]
        )
        self._drafts: dict[str, tuple[int, int, int]] = {}  # by group: epoch, and its totals

    def drafts(self, group: str, epoch: int, drafted: int, accepted: int) -> None:
        """A group's totals of an epoch: each epoch counts from 0, and the counters go on."""
        known = self._drafts.get(group, (epoch, 0, 0))
        if epoch < known[0]:
            return  # of a leader that is over
        before = known[1:] if epoch == known[0] else (0, 0)
        self._draft_tokens.labels(group).inc(max(0, drafted - before[0]))
        self._accepted_tokens.labels(group).inc(max(0, accepted - before[1]))
        self._drafts[group] = (epoch, max(drafted, before[0]), max(accepted, before[1]))

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, list(labels), registry=self.registry)

    def watch(
        self,
        loads: Callable[[], Iterable[GroupLoad]],
        live: Callable[[], int],
        spans_dropped: Callable[[], int],
    ) -> None:
        """Read these at each scrape."""
        self.registry.register(_Live(loads, live, spans_dropped))

    def render(self) -> bytes:
        """The text of ``/metrics``."""
        return generate_latest(self.registry)


class _Live(Collector):
    def __init__(
        self,
        loads: Callable[[], Iterable[GroupLoad]],
        live: Callable[[], int],
        spans_dropped: Callable[[], int],
    ) -> None:
        self._loads = loads
        self._live = live
        self._spans_dropped = spans_dropped

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "stopway_requests_running", "Sequences in the replicas", labels=["group"]
        )
        waiting = GaugeMetricFamily(
            "stopway_requests_waiting", "Sequences that wait at the leader", labels=["group"]
        )
        blocks = GaugeMetricFamily(
            "stopway_kv_blocks", "KV blocks by what holds them", labels=["group", "state"]
        )
        for group, load in self._loads():
            running.add_metric([group], load.get("running", 0))
            waiting.add_metric([group], load.get("waiting", 0))
            for state in ("free", "held", "cached"):
                blocks.add_metric([group, state], load.get(state, 0))
        yield from (running, waiting, blocks)
        yield GaugeMetricFamily(
            "stopway_gateway_requests", "Requests that live in this gateway", value=self._live()
        )
        yield CounterMetricFamily(
            "stopway_spans_dropped", "Spans lost to a full queue", value=self._spans_dropped()
        )
