"""The arithmetic of the bench, its cases against a fake server, and the turn cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stopway_cli.bench import calibration, command, figures, server, turns
from stopway_cli.errors import CliError, Exit
from stopway_sim.fleet import CostModel, Figure


def test_percentiles_are_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [figures.percentile(values, p) for p in (0.0, 0.2, 0.5, 0.99, 1.0)] == [1, 1, 3, 5, 5]
    assert figures.percentile([7.0], 0.5) == 7.0
    with pytest.raises(ValueError, match="no measurements"):
        figures.percentile([], 0.5)


def test_ratios_are_to_the_first_server_and_only_of_what_both_have() -> None:
    first = {"streams_1": {"tokens_per_s": 100.0}, "cancel": {"ms": {"p50": 2.0, "n": 8}}, "z": 0}
    second = {"streams_1": {"tokens_per_s": 146.0}, "cancel": {"ms": {"p50": 3.0, "n": 4}}, "z": 5}
    third = {"streams_1": {"tokens_per_s": 50.0}}
    assert figures.ratios([first, second, third]) == [
        {"streams_1.tokens_per_s": 1.0, "cancel.ms.p50": 1.0, "z": None},
        {"streams_1.tokens_per_s": 1.46, "cancel.ms.p50": 1.5, "z": None},
        {"streams_1.tokens_per_s": 0.5},
    ]
    assert figures.ratios([]) == []


def test_a_chunk_may_carry_several_tokens() -> None:
    stream = server.Stream()
    chunk: dict[str, Any] = {"choices": [{"delta": {"content": "two words"}}]}
    server.count(stream, chunk, 0.5)
    server.count(stream, chunk, 0.9)
    assert (stream.tokens, stream.first_token_s) == (2, 0.5)
    server.count(stream, {"choices": [], "usage": {"completion_tokens": 7}}, 1.0)
    assert stream.tokens == 7


def test_keys_are_for_all_or_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOPWAY_KEY", raising=False)
    assert command.key_for((), 0, 2) == ""
    assert command.key_for(("a",), 1, 2) == "a"
    assert command.key_for(("a", "b"), 1, 2) == "b"
    with pytest.raises(CliError, match="2 keys for 3 servers"):
        command.key_for(("a", "b"), 0, 3)


def test_long_prompts_share_no_prefix() -> None:
    assert server.long_prompt(1)[:4] != server.long_prompt(2)[:4]
    assert len(server.long_prompt(1).split()) == server.PREFILL_WORDS + 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOADS", ((1, 5), (2, 5)))
    monkeypatch.setattr(server, "SETTLE_S", 0.01)
    monkeypatch.setattr(server, "PREFILL_LEAVE_S", 0.002)


def plan(*urls: str) -> command.Plan:
    return command.Plan(urls, quick=True, json=True)


async def test_one_document_with_figures_and_ratios(
    gateway: Any, small: None, wait_until: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command.run(plan(gateway.url, gateway.url)) is Exit.OK
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["turns"] is None
    first, second = document["servers"]
    assert first["kind"] == "stopway" and first["model"] == "fake-model"
    assert first["figures"]["streams_2"]["tokens_per_s"] > 0
    assert first["figures"]["disconnect_decoding"]["method"] == "metrics"
    assert first["figures"]["cancel"]["ms"]["n"] == 3
    assert first["figures"]["disconnect_prefill"]["probe_ms"]["p50"] > 0
    assert set(first["ratios"].values()) <= {1.0, None}
    assert second["ratios"].keys() == first["ratios"].keys()
    assert "streams_1" in captured.err
    await wait_until(lambda: not gateway.running)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (command.Plan(("nonsense",)), "'nonsense' is no URL; write http://HOST:PORT"),
        (command.Plan(("localhost:8080",)), "is no URL"),
        (command.Plan(("http://",)), "is no URL"),
        (command.Plan(("http://[::1",)), "is no URL"),
        (command.Plan(("http://a:port",)), "is no URL"),
        (command.Plan(), "name a server's URL"),
        (command.Plan(("http://a",), tensor=2), "--tensor has no effect without --local"),
        (
            command.Plan(("http://a",), tensor=2, pipeline=2),
            "--tensor and --pipeline have no effect without --local: .*; leave them out",
        ),
        (command.Plan(local=True, key=("k",)), "--key has no effect without a URL"),
        (command.Plan(local=True, model="m"), "--model has no effect without a URL"),
        (command.Plan(turns=True, quick=True), "--quick has no effect without a server"),
    ],
)
async def test_what_cannot_be_measured_is_said_first(
    asked: command.Plan, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "measure", None)
    monkeypatch.setattr(server, "examine", None)
    with pytest.raises(CliError, match=message) as raised:
        await command.run(asked)
    assert raised.value.code is Exit.USAGE


async def test_a_server_without_metrics_is_probed(gateway: Any, small: None) -> None:
    gateway.speaks_metrics = False
    gateway.refuse_extras = True
    subject = server.Subject(gateway.url)
    await server.examine(subject)
    assert (subject.kind, subject.extras, subject.model) == ("", {}, "fake-model")
    found = await server.disconnect(subject, repeats=2, seed=0)
    assert found["method"] == "probe" and found["ms"]["n"] == 2


def test_the_document_has_the_calibrated_cost_model_for_the_simulation() -> None:
    cost = CostModel(tensor=2, blocks=500, decode=((1, 0.004), (8, 0.02)))
    beside = calibration.Simulated(cost, {"8 streams": [Figure("tokens_per_s", 100.0, 110.0)]})
    document = json.loads(json.dumps(command.to_json([], [], None, beside)))
    assert CostModel.from_json(document["cost"]) == cost
    (figure,) = document["simulated"]["8 streams"]
    assert (figure["measured"], figure["simulated"]) == (100.0, 110.0)
    without = command.to_json([], [], None)
    assert (without["cost"], without["simulated"]) == (None, None)


def test_the_tables_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    subjects = [server.Subject("http://a", kind="vllm"), server.Subject("http://b")]
    found = [{"streams_1": {"tokens_per_s": 100.0}}, {"streams_1": {"tokens_per_s": 150.0}}]
    command.print_servers(command.to_json(subjects, found, None))
    shown = capsys.readouterr().out
    assert "150.0 (x1.50)" in shown and "vllm" in shown and "unknown" in shown


def test_turn_cost_is_of_a_full_house_whose_books_balance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = turns.World(running=4, waiting=10)
    world.fill()
    assert (world.planner.running, world.planner.waiting) == (4, 10)
    assert world.planner.replica.digest == world.follower.digest
    world.follower.check()
    found = turns.measure(running=4, waiting=10, turns=6)
    for kind in ("decode", "stop_and_submit"):
        assert found[kind]["planner_ms"]["n"] == 6
        assert found[kind]["planner_ms"]["p50"] > 0
    command.print_turns(found)
    assert "stop and submit" in capsys.readouterr().out


def test_a_cost_model_is_made_of_what_a_leader_saw() -> None:
    times = [
        *[[1, 0, 50 + context, 0, 0.010 + 2e-6 * context] for context in range(0, 1600, 200)],
        [8, 0, 800, 0, 0.024],
        *[[0, 100, 0, 100 * n, 0.058 + 1e-4 * n] for n in range(0, 800, 100)],
    ]
    steps = [[number, *time] for number, time in enumerate(times, 51)]
    blocks = {"total": 500, "block_size": 16}
    ledger = {"step_times": steps, "blocks": blocks, "max_batch_tokens": 256}
    cost = calibration.cost_model(ledger, 50, 1, 2, 0.004)
    assert cost.max_batch_tokens == 256
    assert (cost.pipeline, cost.window, cost.blocks, cost.redis_s) == (2, 2, 500, 0.004)
    assert cost.step_s(8, 0, 800) == pytest.approx(2 * 0.024)
    assert cost.step_s(0, 100) == pytest.approx(2 * 0.058)
    assert cost.context_token_s == pytest.approx(2 * 0.000002)
    assert cost.prefill_pair_s == pytest.approx(2 * 0.000001)
    with pytest.raises(CliError, match="at least two numbers of decoding rows"):
        calibration.cost_model({**ledger, "step_times": steps[:1]}, 50, 1, 1, 0.0)


def test_a_cost_model_is_made_of_no_step_of_before() -> None:
    # Steps that were cut short have no times, so their numbers have gaps.
    before = [[number, rows, 0, 9, 0, 9.0] for number, rows in ((7, 1), (8, 8), (10, 16))]
    steps = [[12, 1, 0, 9, 0, 0.010], [15, 8, 0, 9, 0, 0.024], [18, 0, 100, 0, 0, 0.058]]
    ledger = {
        "step": 19,
        "step_times": [*before, *steps],
        "blocks": {"total": 500, "block_size": 16},
        "max_batch_tokens": 256,
    }
    cost = calibration.cost_model(ledger, 10, 1, 1, 0.0)
    assert [rows for rows, _ in cost.decode] == [1, 8]
    assert cost.step_s(1, 0) == pytest.approx(0.010)


def test_the_simulation_is_printed_beside_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    command.print_beside({"8 streams": [Figure("tokens_per_s", 100.0, 110.0)]})
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == ["8", "streams", "tokens", "per", "s", "100.0", "110.0", "+10%"]
