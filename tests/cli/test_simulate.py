"""``stopway sim`` and ``stopway compare``: options in, tables, JSON and a page out."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from stopway_cli.errors import Exit
from stopway_cli.main import finish
from stopway_cli.simulate import charts, document, page, register
from stopway_cli.simulate.figures import SHOWN, best_of
from stopway_core.policies import POLICIES
from stopway_sim.fleet import SCENARIOS

LITTLE = ["--groups", "2", "--requests", "40", "--processes", "1", "--json"]
REPORT: dict[str, Any] = {
    "policy": str,
    "seed": int,
    "groups": int,
    "requests": int,
    "makespan_s": float,
    "outcomes": dict,
    "reasons": dict,
    "stops": ["given_up", "issued", "already_finished", "too_late"],
    "cancel_s": ["detect", "notify", "effective", "reclaimed"],
    "latency_s": ["first_token", "total"],
    "tokens": [
        "goodput_per_s",
        "throughput_per_s",
        "delivered",
        "thrown_away",
        "prefill_thrown_away",
        "recomputed",
        "cache_hits",
        "cache_hits_after_stop",
    ],
    "preemptions": int,
    "block_seconds_after_stop": float,
    "hazards": int,
    "off_queue": ["host_loads", "host_loads_given_up", "transfers", "transfer_retries"],
    "checks": ["checked_turns", "alive_at_end", "held_at_end"],
}


def stopway(*arguments: str) -> Result:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    register(app, finish)
    return CliRunner().invoke(app, list(arguments))


def document_of(result: Result) -> dict[str, Any]:
    """The one document on stdout; progress is on stderr."""
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def check_schema(report: dict[str, Any]) -> None:
    assert list(report) == list(REPORT)
    for name, kind in REPORT.items():
        if isinstance(kind, list):
            assert list(report[name]) == kind
        else:
            assert isinstance(report[name], kind), name
    for spread in (*report["cancel_s"].values(), *report["latency_s"].values()):
        assert list(spread) == ["p50", "p90", "p99", "max", "n"]
        if spread["n"]:
            assert spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]


def test_sim_prints_one_document_that_the_seed_decides() -> None:
    arguments = ["sim", *LITTLE, "--cancel", "0.4", "--cancel-after", "0.3", "--check", "1"]
    first = document_of(stopway(*arguments))
    check_schema(first)
    assert first["stops"]["given_up"] > 5
    assert first["checks"]["checked_turns"] > 0
    assert document_of(stopway(*arguments)) == first
    assert document_of(stopway(*arguments, "--seed", "2")) != first


def test_every_option_of_sim_reaches_the_simulation() -> None:
    found = document_of(
        stopway(
            *("sim", *LITTLE, "--policy", "sglang", "--clients", "6", "--think", "0.05"),
            *("--prompt", "uniform:20:60", "--output", "constant:30", "--shared", "0.5"),
            *("--prefixes", "1", "--prefix-tokens", "64", "--follow-ups", "0.5"),
            *("--cancel", "0.3", "--cancel-after-tokens", "5", "--disconnects", "0"),
            *("--storm", "0.5:0.5", "--deadline-total", "30", "--lose-rank", "0.3:1:0.5"),
            *("--redis-down", "0:0.2", "--host-loads", "10:4:0.01"),
            *("--cost-field", "blocks=2048", "--cost-field", "max_model_len=1024"),
        )
    )
    assert found["policy"] == "sglang"
    assert sum(found["outcomes"].values()) == 40
    assert found["reasons"]["rank_lost"] >= 1
    assert "client_disconnect" not in found["reasons"]
    assert found["tokens"]["cache_hits"] > 0
    assert found["off_queue"]["host_loads"] > 0


def test_priorities_and_choices_are_counted_and_shown(tmp_path: Path) -> None:
    asked = ("--priority=-2:0.5", "--priority", "4:0.2", "--choices", "constant:2")
    found = document_of(stopway("sim", *LITTLE, *asked))
    assert list(found) == [*REPORT, "priorities", "choices"]
    assert list(found["priorities"]) == ["-2", "0", "4"]
    for level in found["priorities"].values():
        assert list(level) == ["requests", "finished", "preemptions", "first_token_s"]
    assert found["choices"]["asked"] == 2 * 40
    trace, html = tmp_path / "t.csv", tmp_path / "r.html"
    trace.write_text("arrival,prompt,output,priority,choices\n0,50,4,-2,\n0.1,50,40,,3\n")
    result = stopway("compare", "--trace", str(trace), "--processes", "1", "--html", str(html))
    assert result.exit_code == 0
    for shown in (result.stdout, html.read_text(encoding="utf-8")):
        assert "priority -2: first token p99 ms" in shown
        assert "priority 0: preemptions" in shown
        assert "tokens taken from a choice" in shown


def test_sim_without_json_is_a_table() -> None:
    result = stopway("sim", "--requests", "10", "--groups", "1", "--cancel", "1")
    assert result.exit_code == 0
    for shown in SHOWN:
        assert shown.title in result.stdout
    assert "ended: " in result.stdout


def test_sim_runs_a_trace(tmp_path: Path) -> None:
    trace, cost = tmp_path / "t.csv", tmp_path / "cost.json"
    trace.write_text("arrival,prompt,output,cancel\n0,50,4,\n0.1,50,400,0.5\n")
    cost.write_text('{"blocks": 256, "max_model_len": 512}')
    found = document_of(stopway("sim", "--trace", str(trace), "--cost", str(cost), "--json"))
    assert found["reasons"] == {"client_cancel": 1, "length": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "'best' is no policy; choose one of native"),
        (["--scenario", "calm"], "'calm' is no scenario; choose one of cancel-storm"),
        (["--prompt", "long"], "'long' is no distribution"),
        (["--storm", "5"], "--storm '5': write it as AT:SHARE"),
        (["--lose-rank", "1:x:2"], "write it as AT:GROUP:DOWN_S"),
        (["--cost-field", "blocks"], "there is no =; write NAME=VALUE"),
        (["--cost-field", "speed=9"], "unknown field 'speed'"),
        (["--cost", "/nowhere.json"], "/nowhere.json cannot be read"),
        (["--deadline-total", "-1"], "deadlines are 0 seconds or more"),
        (["--seed", "-1"], "the seed is -1"),
        (["--split", "--groups", "3"], "3 groups is odd"),
        (["--cancel", "2"], "the share of cancelled requests is 2"),
        (["--host-loads", "inf:1:1"], "--host-loads 'inf:1:1': PER_S is inf; give a finite number"),
        (["--host-loads", "1e300:1:1"], "host loads: 0 to 10000 a second"),
        (["--host-loads", "1:inf:1"], "BLOCKS is inf; give a finite number"),
        (["--host-loads", "1:1.5:1"], "BLOCKS is 1.5; give a whole number"),
        (["--host-loads", "1:1:nan"], "SECONDS is nan; give a finite number"),
        (["--storm", "nan:0.5"], "--storm 'nan:0.5': AT is nan; give a finite number"),
        (["--storm=-5:0.5"], "a storm comes 0 s or later"),
        (["--storm", "5:nan"], "SHARE is nan; give a finite number"),
        (["--lose-rank", "1:nan:1"], "GROUP is nan; give a finite number"),
        (["--lose-rank", "1:0.5:1"], "GROUP is 0.5; give a whole number"),
        (["--redis-down", "0:inf"], "TO is inf; give a finite number"),
        (["--cost-field", "blocks=NaN"], "blocks is nan; give a finite number"),
        (["--cost-field", "blocks=1e999"], "blocks is inf; give a finite number"),
        (["--cost-field", f"blocks=1{'0' * 400}"], "blocks is an integer of hundreds of digits"),
        (["--cost-field", f"decode={'[' * 100_000}"], "is no number; write NAME=VALUE"),
        (["--prompt", "lognormal:100:1e308"], "is no distribution of counts"),
        (["--prompt", "lognormal:100:11"], "SIGMA is 0 to 10"),
        (["--prompt", "lognormal:1e308:1"], "is no distribution of counts"),
        (["--output", "constant:inf"], "is no distribution of counts"),
        (["--think", "nan"], "clients are 0 or more, and think 0 to"),
        (["--think", "inf"], "clients are 0 or more, and think 0 to"),
        (["--rate", "nan"], "a rate of nan requests a second"),
        (["--rate", "1e-308"], "a rate of 1e-308 requests a second"),
        (["--cancel-after", "nan"], "cancels come 0 s or later"),
        (["--cancel-after-tokens", "1e308"], "cancels come 0 s or later"),
        (["--deadline-total", "nan"], "deadlines are 0 seconds or more"),
        (["--groups", "0"], "a fleet of 0 groups; give at least 1"),
        (["--groups", "0", "--scenario", "cancel-storm"], "a fleet of 0 groups"),
        (["--requests", "0"], "0 requests; give at least 1"),
        (["--requests", "0", "--scenario", "cancel-storm"], "0 requests; give at least 1"),
        (["--priority", "high:0.5"], "--priority 'high:0.5': write it as LEVEL:SHARE"),
        (["--priority", "0.5:0.5"], "--priority: LEVEL is 0.5; give a whole number"),
        (["--priority", "1:nan"], "SHARE is nan; give a finite number"),
        (["--priority", "1:0.7", "--priority", "2:0.7"], "more than 1 together"),
        (["--choices", "constant:65"], "a request has 1 to 64 choices"),
        (["--choices", "two"], "'two' is no distribution of counts"),
        (["--split", "--choices", "constant:2"], "of one choice; give 1 a request"),
        (["--cost-field", "prefill_pair_s=-1"], "prefill_pair_s is -1.0; give seconds"),
        (["--check", "-1"], "-1 groups to check; give 0 or more"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = stopway("sim", *arguments)
    assert result.exit_code == Exit.CONFIG
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["sim", "compare"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"blocks": NaN}', "cost: blocks is nan; give a finite number"),
        ('{"blocks": 1e999}', "cost: blocks is inf; give a finite number"),
        ('{"blocks": 1e12}', "cost: blocks is 1000000000000; give 1 to 16777216"),
        ('{"base_s": Infinity}', "cost: base_s is inf; give a finite number"),
        ('{"base_s": 1e300}', "cost: base_s is 1e+300; give seconds"),
        ('{"decode": [[1e999, 1]]}', "cost: decode is inf; give a finite number"),
        ('{"decode": [[1, NaN]]}', "cost: decode is nan; give a finite number"),
        ("[" * 100_000, "cost: not JSON"),
    ],
)
def test_a_cost_model_that_cannot_be_is_one_sentence(
    command: str, text: str, message: str, tmp_path: Path
) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(text)
    result = stopway(command, "--cost", str(cost))
    assert result.exit_code == Exit.CONFIG
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The document and the page of one comparison."""
    html = tmp_path_factory.mktemp("page") / "report.html"
    result = stopway("compare", *LITTLE, "--html", str(html))
    return document_of(result), html.read_text(encoding="utf-8")


def test_compare_runs_all_policies_on_one_workload(compared: tuple[dict[str, Any], str]) -> None:
    document, _ = compared
    assert list(document) == ["scenario", "about", "cost", "runs"]
    assert document["scenario"] == "cancel-storm"
    assert [run["policy"] for run in document["runs"]] == list(POLICIES)
    for run in document["runs"]:
        check_schema(run)
        assert sum(run["outcomes"].values()) == run["requests"] == 40
    assert len({run["stops"]["given_up"] for run in document["runs"]}) <= 3


def test_compare_can_be_of_some_and_is_a_table_without_json() -> None:
    result = stopway(
        *("compare", "--requests", "10", "--groups", "2", "--scenario", "pd-split"),
        *("--policy", "native", "--policy", "deepinfer", "--processes", "1"),
    )
    assert result.exit_code == 0
    assert re.search(r"figure +native +deepinfer", result.stdout)


class Page(HTMLParser):
    """Collects tags and everything that could reach out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.reaching: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.reaching += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_needs_nothing_from_elsewhere(compared: tuple[dict[str, Any], str]) -> None:
    document, text = compared
    seen = Page()
    seen.feed(text)
    assert not seen.reaching
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "prefers-color-scheme:dark" in text
    assert seen.tags.count("svg") == 11
    for run in document["runs"]:
        assert run["policy"] in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(drawing)


def test_the_page_escapes_names(compared: tuple[dict[str, Any], str]) -> None:
    document = {**compared[0], "scenario": "<b>.csv"}
    empty: list[dict[str, list[float]]] = [{"effective": [], "reclaimed": []}] * 6
    text = page.render(document, empty)
    assert "<b>" not in text and "&lt;b&gt;.csv" in text
    assert "Nothing was stopped." in text


def test_bars_are_in_proportion_and_lines_rise() -> None:
    widths = re.findall(
        r'width="([\d.]+)" height="16"', charts.bars(["a", "b", "c"], [4, 1, None], 0)
    )
    assert float(widths[0]) == pytest.approx(4 * float(widths[1]))
    assert float(widths[2]) == 1.0
    found = re.search(r'points="([^"]+)"', charts.cdfs(["a"], [[0.001, 0.01, 0.1]]))
    assert found is not None
    points = [tuple(map(float, pair.split(","))) for pair in found[1].split()]
    assert points == [(212.7, 242.0), (379.3, 127.0), (546.0, 12.0)]


def test_the_best_of_a_figure_is_marked_unless_all_are_alike() -> None:
    low, high = SHOWN[0], next(s for s in SHOWN if s.best == "high")
    runs: list[dict[str, Any]] = [
        {"cancel_s": {"notify": {"p50": v}}, "tokens": {"cache_hits": n}}
        for v, n in ((0.2, 5), (0.1, 9), (None, 5))
    ]
    assert best_of(low, runs) == {1}
    assert best_of(high, runs) == {1}
    assert best_of(high, [runs[0], runs[2]]) == set()
    assert low.text(runs[2]) == "-"


def test_the_document_has_every_scenario_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are of one seed, but of this machine's mathematics: their shape is compared."""
    committed = document.DOCUMENT.read_text(encoding="utf-8")
    monkeypatch.setattr(document, "REQUESTS", 24)
    again = document.renewed(committed)

    def shape(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("#", "| |"))]

    assert shape(again) == shape(committed)
    assert shape(committed).count(f"| | {' | '.join(POLICIES)} |") == len(SCENARIOS)
