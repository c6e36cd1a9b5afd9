"""The HTML report: one file, no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from stopway_cli.simulate import charts
from stopway_cli.simulate.figures import Shown, best_of, shown_in

_LIGHT = ("#1f6feb", "#d1620a", "#1a7f37", "#a626a4", "#b8860b", "#c62f5b")
_DARK = ("#6ea8fe", "#ffa657", "#56d364", "#d2a8ff", "#e3c04d", "#ff7b9c")

_BARS = (
    ("Stop effective, p99", "ms, from the client's act to the turn that ends the request",
     Shown("", ("cancel_s", "effective", "p99"), 1000, 1)),
    ("Blocks reusable, p99", "ms, from the client's act",
     Shown("", ("cancel_s", "reclaimed", "p99"), 1000, 1)),
    ("Tokens thrown away", "sampled and delivered to nobody",
     Shown("", ("tokens", "thrown_away"))),
    ("Prefill thrown away", "prompt tokens launched after the client's act",
     Shown("", ("tokens", "prefill_thrown_away"))),
    ("Block-seconds after a stop", "blocks x seconds from the client's act until safe",
     Shown("", ("block_seconds_after_stop",), 1, 1)),
    ("Recomputed tokens", "after preemptions", Shown("", ("tokens", "recomputed"))),
    ("Hazards", "blocks taken off-queue while a step may still write them",
     Shown("", ("hazards",))),
    ("Goodput", "tokens per second of answers that were finished and read",
     Shown("", ("tokens", "goodput_per_s"))),
    ("First token, p99", "ms, from the client's request",
     Shown("", ("latency_s", "first_token", "p99"), 1000, 1)),
)  # fmt: skip

_STYLE = """
:root{--back:#fff;--text:#1c2128;--soft:#59636e;--line:#d9dee3;--card:#f6f8fa%s}
@media (prefers-color-scheme:dark){:root{--back:#0f1318;--text:#e6ebf0;--soft:#9aa5b1;
--line:#2b333c;--card:#171c23%s}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:0 auto;
max-width:1240px;padding:28px 20px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:0}p{margin:2px 0 10px;color:var(--soft)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:16px}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;
margin:0 0 16px}.grid2 section{margin:0}.grid2{margin-bottom:16px}
svg{width:100%%;height:auto;display:block}
svg text{fill:var(--text);font:12px system-ui,sans-serif}svg .tick{fill:var(--soft);font-size:11px}
svg .grid{stroke:var(--line);stroke-width:1}
polyline{fill:none}
.legend span{margin-right:16px;white-space:nowrap;color:var(--text)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}td.best{font-weight:700}
"""


def render(document: dict[str, Any], cdfs: Sequence[dict[str, list[float]]]) -> str:
    """The page of a ``compare`` document; ``cdfs`` are the runs' quantiles by series."""
    runs = document["runs"]
    names = [run["policy"] for run in runs]
    first = runs[0]
    title = f"Stop policies: {document['scenario']}"
    lead = (
        f"{document['about']}. {first['requests']:,} requests on {first['groups']} groups, seed "
        f"{first['seed']}; simulated with the real planner and modelled times."
    )
    plots = "".join(
        f"<section><h2>{title}</h2>{charts.cdfs(names, [each[series] for each in cdfs])}"
        f"{charts.legend(names)}</section>"
        for title, series in (
            ("When a stop is effective", "effective"),
            ("When its blocks are reusable", "reclaimed"),
        )
    )
    panels = "".join(_panel(head, unit, shown, names, runs) for head, unit, shown in _BARS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(lead)}</p>"
        f'<div class="grid2">{plots}</div><div class="grid2">{panels}</div>'
        f"<section><h2>All figures</h2>{_table(names, runs)}</section></body></html>\n"
    )


def _panel(head: str, unit: str, shown: Shown, names: list[str], runs: list[dict[str, Any]]) -> str:
    plot = charts.bars(names, [shown.value(run) for run in runs], shown.digits)
    return f"<section><h2>{escape(head)}</h2><p>{escape(unit)}</p>{plot}</section>"


def _table(names: list[str], runs: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for shown in shown_in(runs):
        best = best_of(shown, runs)
        cells = "".join(
            f'<td class="best">{shown.text(run)}</td>'
            if index in best
            else f"<td>{shown.text(run)}</td>"
            for index, run in enumerate(runs)
        )
        rows.append(f"<tr><td>{escape(shown.title)}</td>{cells}</tr>")
    return f'<div class="scroll"><table><tr><th>figure</th>{head}</tr>{"".join(rows)}</table></div>'


def _style() -> str:
    light, dark = (
        "".join(f";--c{index}:{colour}" for index, colour in enumerate(colours))
        for colours in (_LIGHT, _DARK)
    )
    # Later lines are thinner, so that equal ones do not hide each other.
    marks = "".join(
        f".fill{i}{{fill:var(--c{i})}}.key{i}{{background:var(--c{i})}}"
        f".line{i}{{stroke:var(--c{i});stroke-width:{6 - 0.8 * i:g}}}"
        for i in range(len(_LIGHT))
    )
    return _STYLE % (light, dark) + marks
