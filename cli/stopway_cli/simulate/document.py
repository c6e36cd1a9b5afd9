"""The figures of docs/policies.md: ``python -m stopway_cli.simulate.document`` writes them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from stopway_cli.simulate.figures import best_of, shown_in
from stopway_core.policies import POLICIES
from stopway_sim.fleet import SCENARIOS, Scenario, simulate

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "policies.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
GROUPS, REQUESTS, SEED = 4, 600, 1


def table(scenario: Scenario) -> str:
    """What every policy makes of a scenario, as Markdown; the best of a line is bold."""
    fleet, workload = scenario.plan(GROUPS, REQUESTS)
    runs: list[dict[str, Any]] = [
        simulate(replace(fleet, policy=policy), workload, SEED, processes=2).to_json()
        for policy in POLICIES.values()
    ]
    lines = [
        f"### {scenario.name}",
        "",
        f"{scenario.about[0].upper()}{scenario.about[1:]}.",
        "",
        f"| | {' | '.join(POLICIES)} |",
        f"|---|{'---:|' * len(POLICIES)}",
    ]
    for shown in shown_in(runs):
        best = best_of(shown, runs)
        cells = [shown.text(run) for run in runs]
        if set(cells) <= {"0", "0.0"}:
            continue
        cells = [f"**{cell}**" if i in best else cell for i, cell in enumerate(cells)]
        lines.append(f"| {shown.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figures() -> str:
    """All tables, between their marks."""
    tables = "\n\n".join(table(scenario) for scenario in SCENARIOS.values())
    return f"{BEGIN}\n\n{tables}\n\n{END}"


def renewed(text: str, figures: str) -> str:
    """``text`` with these figures."""
    before, rest = text.split(BEGIN)
    return before + figures + rest.split(END)[1]


if __name__ == "__main__":
    found = figures()  # takes a minute, in which the text may change
    DOCUMENT.write_text(renewed(DOCUMENT.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"{DOCUMENT} written", file=sys.stderr)
