"""``stopway sim`` and ``stopway compare``: options in, tables, JSON and a page out."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from stopway_cli.errors import Exit
from stopway_cli.main import finish
from stopway_cli.simulate import charts, document, page, register, running, tables
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
        (["--prompt", "long"], "'long' is no distribution"),
        (["--storm", "5"], "--storm '5': write it as AT:SHARE"),
        (["--lose-rank", "1:x:2"], "write it as AT:GROUP:DOWN_S"),
        (["--cost-field", "blocks"], "there is no =; write NAME=VALUE"),
        (["--cost-field", "speed=9"], "unknown field 'speed'"),
        (["--cost", "/nowhere.json"], "/nowhere.json cannot be read: No such file or directory\n"),
        (["--trace", "/"], "/ cannot be read: Is a directory\n"),
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
        (["--prompt", "lognormal:100:11"], "SIGMA is 11; give 0 to 10"),
        (["--prompt", "lognormal:0:1"], "MEDIAN is 0; give 1 or more"),
        (["--redis-down", "5:3"], "TO must be after FROM"),
        (["--lose-rank", "1:0:0"], "DOWN_S is 0; give more than 0"),
        (["--check", "9"], "9 groups to check; give at most 4"),
        (["--prompt", "lognormal:1e308:1"], "is no distribution of counts"),
        (["--output", "constant:inf"], "is no distribution of counts"),
        (["--think", "nan"], "clients are 0 or more, and think 0 to"),
        (["--think", "inf"], "clients are 0 or more, and think 0 to"),
        (["--rate", "nan"], "a rate of nan requests a second"),
        (["--rate", "1e-308"], "a rate of 1e-308 requests a second"),
        (["--cancel-after", "nan"], "cancels come 0 s or later"),
        (["--cancel-after-tokens", "1e308"], "cancels come 0 s or later"),
        (["--deadline-total", "nan"], "deadlines are 0 seconds or more"),
        (["--requests", "99999999"], "99999999 requests; give at least 1, at most"),
        (["--priority", "high:0.5"], "--priority 'high:0.5': write it as LEVEL:SHARE"),
        (["--priority", "0.5:0.5"], "--priority: LEVEL is 0.5; give a whole number"),
        (["--priority", "1:nan"], "SHARE is nan; give a finite number"),
        (["--priority", "1:0.7", "--priority", "2:0.7"], "more than 1 together"),
        (["--choices", "constant:65"], "a request has 1 to 64 choices"),
        (["--choices", "two"], "'two' is no distribution of counts"),
        (["--split", "--choices", "constant:2"], "with --split every request has 1 choice"),
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
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["sim", "compare"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "'best' is none of native, vllm, sglang"),
        (["--scenario", "calm"], "'calm' is none of cancel-storm, memory-pressure"),
        (["--groups", "0"], "--groups"),
        (["--requests", "0"], "--requests"),
        (["--processes", "0"], "--processes"),
    ],
)
def test_a_name_or_number_that_an_option_never_takes_is_wrong_usage(
    command: str, arguments: list[str], message: str
) -> None:
    result = stopway(command, *arguments)
    assert result.exit_code == Exit.USAGE
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "flags", "why"),
    [
        (["--trace", "T", "--cancel", "0.3"], "--cancel has", "with --trace: the file says who"),
        (["--trace", "T", "--requests", "9"], "--requests has", "with --trace"),
        (["--trace", "T", "--rate", "9", "--prompt", "constant:4"], "--rate and --prompt", "leave"),
        (["--trace", "T", "--clients", "2", "--think", "1"], "--clients and --think have", "with"),
        (["--trace", "T", "--output", "constant:4"], "--output has", "with --trace"),
        (["--trace", "T", "--priority", "1:0.5"], "--priority has", "with --trace"),
        (["--trace", "T", "--choices", "constant:2"], "--choices has", "with --trace"),
        (["--trace", "T", "--shared", "0.5"], "--shared has", "with --trace"),
        (["--trace", "T", "--follow-ups", "0.5"], "--follow-ups has", "with --trace"),
        (["--clients", "2", "--rate", "4"], "--rate has", "with --clients"),
        (["--think", "2"], "--think has", "without --clients"),
        (["--prefixes", "2"], "--prefixes has", "without --shared"),
        (["--prefix-tokens", "2", "--shared", "0"], "--prefix-tokens has", "without --shared"),
        (["--cancel-after", "2"], "--cancel-after has", "without --cancel"),
        (["--cancel-after-tokens", "2", "--storm", "1:1"], "--cancel-after-tokens has", "without"),
        (
            ["--cancel", "1", "--cancel-after", "2", "--cancel-after-tokens", "2"],
            "--cancel-after has",
            "with --cancel-after-tokens",
        ),
        (["--disconnects", "1"], "--disconnects has", "without --cancel or --storm"),
        (
            ["--scenario", "pd-split", "--cancel", "0", "--cancel-after", "1"],
            "--cancel-after has",
            "without --cancel",
        ),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: list[str], flags: str, why: str, tmp_path: Path
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival,prompt,output\n0,50,4\n")
    result = stopway("sim", *(str(trace) if a == "T" else a for a in arguments))
    assert result.exit_code == Exit.USAGE
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert flags in line and "no effect" in line and why in line
    assert line.endswith(("leave it out", "leave them out"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scenario", "pd-split", "--cancel-after", "0.2"],
        ["--scenario", "cancel-storm", "--prefixes", "1"],
        ["--storm", "0.5:0.5", "--disconnects", "1"],
    ],
)
def test_an_option_has_effect_on_what_a_scenario_has(arguments: list[str]) -> None:
    with_it, without = (
        document_of(stopway("sim", *LITTLE, *given)) for given in (arguments, arguments[:2])
    )
    assert with_it != without


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


def cost_of(*arguments: str) -> dict[str, Any]:
    """The cost model that ``compare`` says it has used."""
    little = ("--policy", "native", "--groups", "1", "--requests", "4", "--json")
    found = document_of(stopway("compare", *little, *arguments))
    cost = found["cost"]
    assert isinstance(cost, dict)
    return cost


def test_a_cost_file_is_laid_over_the_scenario_and_a_field_over_both(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text('{"blocks": 700, "turn_s": 0.001}')
    scenario = cost_of("--scenario", "memory-pressure")
    assert (scenario["blocks"], scenario["max_model_len"]) == (1024, 4096)
    layered = cost_of(
        *("--scenario", "memory-pressure", "--cost", str(cost), "--cost-field", "turn_s=0.002")
    )
    assert layered == {**scenario, "blocks": 700, "turn_s": 0.002}


TRACE = "arrival,prompt,output,cancel\n" + "".join(
    f"{i / 10},200,400,{i / 10 + 0.5 if i == 3 else ''}\n" for i in range(40)
)


def test_a_trace_is_compared_alone_unless_a_scenario_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("\ufeff" + TRACE, encoding="utf-8")  # as spreadsheets write it
    arguments = ("compare", "--trace", str(trace), "--policy", "native", "--json")
    alone = document_of(stopway(*arguments))
    assert (alone["scenario"], alone["about"]) == ("t.csv", "arrivals and cancels of a file")
    (run,) = alone["runs"]
    assert (run["requests"], run["stops"]["given_up"]) == (40, 1)
    assert run["off_queue"]["host_loads"] == 0
    both = document_of(stopway(*arguments, "--scenario", "cancel-storm"))
    assert both["scenario"] == "t.csv with cancel-storm"
    assert "with the storms, host loads" in both["about"]
    (run,) = both["runs"]
    assert run["stops"]["given_up"] > 10  # the storms come within the file's time
    assert run["off_queue"]["host_loads"] > 0


def test_no_deadline_is_0_as_for_up() -> None:
    asked = ("sim", *LITTLE)
    zero = ("--deadline-queue", "0", "--deadline-first-token", "0", "--deadline-total", "0")
    assert document_of(stopway(*asked, *zero)) == document_of(stopway(*asked))


def test_a_page_that_cannot_be_written_is_said_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "simulate", None)
    html = tmp_path / "none" / "report.html"
    result = stopway("compare", "--html", str(html))
    assert result.exit_code == Exit.CONFIG
    assert result.stderr == f"stopway: {html} cannot be written: No such file or directory\n"


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


@pytest.mark.parametrize("width", [80, 60, 160])
def test_every_value_can_be_read_on_a_terminal(
    width: int, compared: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = deepcopy(compared[0])
    document["runs"][0]["tokens"]["thrown_away"] = 123_456_789
    terminal = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(tables.render, "console", lambda: terminal)
    tables.many(document)
    assert isinstance(terminal.file, StringIO)
    lines = terminal.file.getvalue().splitlines()
    assert all(len(line) <= width and "\u2026" not in line for line in lines)
    headings = [line.split()[1:] for line in lines if line.split()[:1] == ["figure"]]
    assert [name for names in headings for name in names] == list(POLICIES)
    assert len(headings) == {80: 2, 60: 3, 160: 1}[width]
    for shown in SHOWN:
        found = [
            line.split(shown.title)[1].split()
            for line in lines
            if line.strip().startswith(f"{shown.title} ")
        ]
        expected = [shown.text(run) for run in document["runs"]]
        assert [text for texts in found for text in texts] == expected


@pytest.mark.parametrize("command", ["sim", "compare"])
def test_help_names_every_policy_and_scenario(command: str) -> None:
    help_text = re.sub(r"\s+", "", stopway(command, "--help").stdout)
    for name in (*POLICIES, *SCENARIOS):
        assert name in help_text


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


def test_what_is_printed_alike_is_as_good() -> None:
    low = SHOWN[0]
    runs: list[dict[str, Any]] = [
        {"cancel_s": {"notify": {"p50": v}}} for v in (0.00101, 0.00104, 0.002)
    ]
    assert [low.text(run) for run in runs] == ["1.0", "1.0", "2.0"]
    assert best_of(low, runs) == {0, 1}
    assert best_of(low, runs[:2]) == set()


def test_the_document_has_every_scenario_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are of one seed, but of this machine's mathematics: their shape is compared."""
    committed = document.DOCUMENT.read_text(encoding="utf-8")
    monkeypatch.setattr(document, "REQUESTS", 24)
    again = document.renewed(committed, document.figures())

    def shape(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("#", "| |"))]

    assert shape(again) == shape(committed)
    assert shape(committed).count(f"| | {' | '.join(POLICIES)} |") == len(SCENARIOS)
