"""Receipts, waterfalls, metrics and ledgers as people see them, from recorded answers."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType

from stopway_cli import ledger, metrics, render, waterfall
from stopway_cli.demo import incomplete, missing_spans
from stopway_cli.waterfall import Span

STOP: dict[str, Any] = {
    "stop_id": "stop-1",
    "request_ids": ["req-1"],
    "count": 1,
    "reason": "client_cancel",
    "status": "reclaimed",
    "outcome": {"finished": 0, "stopped": 1, "failed": 0},
    "trace_id": "ab" * 16,
    "pending_on": [],
    "accepted_at": 100.0,
    "groups": [
        {
            "group": "stopway-g0",
            "epoch": 7,
            "turn_effective": 41,
            "tokens_discarded": 2,
            "blocks_reclaimed": 5,
            "blocks_cached": 3,
            "blocks_lent": 0,
            "ranks": [
                {
                    "rank": rank,
                    "stage": rank,
                    "node": "local",
                    "turn_noticed": 40,
                    "noticed_at": 100.0012 + rank * 0.001,
                    "stopped_at": 100.0031,
                    "reclaimed_at": 100.0154,
                }
                for rank in range(2)
            ],
        }
    ],
}


def text_of(what: RenderableType) -> str:
    console = Console(width=160, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def without(stop: dict[str, Any], key: str) -> dict[str, Any]:
    group = stop["groups"][0]
    ranks = [group["ranks"][0], {**group["ranks"][1], key: None}]
    return {**stop, "groups": [{**group, "ranks": ranks}]}


def test_a_receipt_has_a_row_for_every_rank_with_times_after_acceptance() -> None:
    lines = text_of(render.receipt(STOP)).splitlines()
    assert "stop-1" in lines[0] and "reclaimed" in lines[0] and "client_cancel" in lines[0]
    assert "1 stopped" in lines[0]
    assert "epoch 7, effective at turn 41, 2 tokens discarded, 5 blocks reclaimed" in lines[1]
    assert lines[3].split() == ["0", "0", "local", "40", "+1.2", "ms", "+3.1", "ms", "+15.4", "ms"]
    assert lines[4].split() == ["1", "1", "local", "40", "+2.2", "ms", "+3.1", "ms", "+15.4", "ms"]


def test_a_receipt_that_is_not_whole_names_what_it_waits_for() -> None:
    waiting = {**without(STOP, "reclaimed_at"), "status": "stopped", "pending_on": ["rank 1: x"]}
    shown = text_of(render.receipt(waiting))
    assert "still held by: rank 1: x" in shown
    assert shown.splitlines()[4].split()[-1] == "-"


def test_a_receipt_without_an_acceptance_counts_from_what_it_is_given() -> None:
    bare = {key: value for key, value in STOP.items() if key != "accepted_at"}
    assert render.accepted_at(STOP, 1.0) == 100.0
    assert render.accepted_at(bare, 1.0) == 1.0
    assert render.accepted_at(bare) == 100.0012
    assert render.accepted_at({}) is None
    assert "no turn" in text_of(render.receipt({"groups": [{"group": "g"}]}))


def test_the_demo_accepts_only_a_whole_receipt() -> None:
    assert incomplete(STOP, ranks=2) == ""
    assert "has 3 ranks, its receipt 2" in incomplete(STOP, ranks=3)
    assert "rank 1 has no noticed_at" in incomplete(without(STOP, "noticed_at"), ranks=2)
    assert "pending on" in incomplete({**STOP, "status": "stopped"}, ranks=2)
    assert "no group" in incomplete({**STOP, "groups": []}, ranks=2)


def span(name: str, ident: str, parent: str, start: float, end: float, **attributes: Any) -> Span:
    dotted = {key.replace("_", "."): value for key, value in attributes.items()}
    return Span(ident, parent, name, start, end, dotted)


SPANS = [
    span("request", "a", "", 10.0, 11.0),
    span("stop", "b", "a", 10.5, 10.6, stopway_stop_id="stop-1", stopway_stop_reason="admin"),
    span("stop.reclaim", "r1", "b", 10.49, 10.60, stopway_rank=1),  # a clock behind
    span("stop.reclaim", "r0", "b", 10.55, 10.60, stopway_rank=0),
    span("stop.notify", "n", "b", 10.5, 10.52),
    span("stop.notice", "c0", "n", 10.51, 10.51, stopway_rank=0, stopway_turn_noticed=4),
    span("stop.in_flight", "i0", "b", 10.51, 10.55, stopway_rank=0),
    span("stop", "other", "a", 10.8, 10.9, stopway_stop_id="stop-2"),
]


def test_phases_are_in_order_whatever_the_clocks_say() -> None:
    rows = [
        (depth, s.span_id) for depth, s in waterfall.ordered(waterfall.subtree(SPANS, "stop-1"))
    ]
    assert rows == [(0, "b"), (1, "n"), (2, "c0"), (1, "i0"), (1, "r0"), (1, "r1")]


def test_a_span_whose_parent_is_missing_or_itself_is_still_shown() -> None:
    lost = [span("x", "1", "gone", 0.0, 1.0), span("x", "1", "gone", 0.0, 1.0)]
    assert [s.span_id for _, s in waterfall.ordered(lost)] == ["1"]


def test_a_waterfall_shows_ranks_times_and_facts() -> None:
    shown = text_of(waterfall.render(waterfall.subtree(SPANS, "stop-1"), ascii_only=True))
    lines = shown.splitlines()
    assert lines[1].startswith("stop ") and "100.0 ms" in lines[1] and "admin" in lines[1]
    assert "stop.notice [rank 0]" in lines[3] and "at turn 4" in lines[3]
    assert all("#" in line for line in lines[1:])
    assert "█" in text_of(waterfall.render(SPANS))
    assert text_of(waterfall.render([])).strip().startswith("span")


def test_bars_lie_inside_the_picture() -> None:
    assert waterfall.bar(0.0, 1.0, 0.0, 1.0, width=10) == (0, 10)
    assert waterfall.bar(0.5, 0.5, 0.0, 1.0, width=10) == (5, 1)
    assert waterfall.bar(1.0, 1.0, 0.0, 1.0, width=10) == (9, 1)
    assert waterfall.bar(3.0, 3.0, 3.0, 3.0, width=10) == (0, 1)


def test_jaegers_answer_becomes_the_same_spans() -> None:
    document = {
        "data": [
            {
                "spans": [
                    {
                        "spanID": "b",
                        "operationName": "stop",
                        "startTime": 10_500_000,
                        "duration": 100_000,
                        "references": [{"refType": "CHILD_OF", "spanID": "a"}],
                        "tags": [{"key": "stopway.stop.id", "value": "stop-1"}],
                    }
                ]
            }
        ]
    }
    (found,) = waterfall.from_jaeger(document)
    assert (found.name, found.span_id, found.parent) == ("stop", "b", "a")
    assert abs(found.start - 10.5) < 1e-6 and abs(found.duration_ms - 100.0) < 1e-6
    assert waterfall.from_jaeger({"data": None}) == []


def test_the_demo_names_the_spans_that_are_missing() -> None:
    assert missing_spans(SPANS, ranks=1) == []
    assert "stop.notice [rank 1]" in missing_spans(SPANS, ranks=2)


METRICS = """
# HELP stopway_kv_blocks KV blocks
# TYPE stopway_kv_blocks gauge
stopway_kv_blocks{group="g\\"0",state="free"} 90.0
stopway_kv_blocks{group="g\\"0",state="held"} 4.0
stopway_kv_blocks{group="g\\"0",state="cached"} 6.0
stopway_requests_running{group="g\\"0"} 2.0
stopway_requests_running{group="g1"} 1e0 1700000000000
vllm:num_requests_running{engine="0",model_name="x"} 3
not a line
broken{a="b"} x
"""


def test_prometheus_text() -> None:
    samples = metrics.parse(METRICS)
    assert metrics.total(samples, "stopway_requests_running") == 3.0
    assert metrics.total(samples, "vllm:num_requests_running") == 3.0
    assert metrics.total(samples, "nothing") is None
    load = metrics.groups(samples)['g\\"0']
    assert (load.running, load.blocks.total, load.blocks.held) == (2, 100, 4)


def test_holders_are_counted_by_kind() -> None:
    book = {"holders": {"cache:1": 1, "cache:2": 1, "request:7": 5}}
    assert ledger.holders_by_kind(book) == {"cache": (2, 2), "request": (1, 5)}


def test_a_ledger_answer_may_be_a_map_or_a_list_of_groups() -> None:
    book = {"group": "g0", "blocks": {"total": 9}}
    for answer in ({"groups": {"g0": book}}, {"groups": [book]}, {"g0": book}, [book]):
        assert ledger.total_blocks(ledger.by_group(answer)["g0"]) == 9
