"""``groups``, ``pause``, ``resume`` and ``drain`` against a fake gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from stopway_cli.errors import Exit
from stopway_cli.main import app


def run(gateway: Any, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command for the fake gateway."""
    result = CliRunner().invoke(app, [*arguments, "--url", gateway.url, "--key", gateway.key])
    return result.exit_code, result.stdout, result.stderr


def rows(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines()]


def test_groups_are_a_table(gateway: Any) -> None:
    gateway.modes["g1"] = "keep"
    code, shown, _ = run(gateway, "groups")
    assert code == Exit.OK
    titles, *groups = rows(shown)
    assert titles == ["group", "mode", "epoch", "running", "waiting", "free", "held", "cached"]
    assert groups == [
        ["g0", "running", "7", "1", "2", "90", "0", "10"],
        ["g1", "keep", "7", "1", "2", "90", "0", "10"],
    ]
    assert gateway.changes == []


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_pause_and_resume_all_groups(gateway: Any, mode: str) -> None:
    code, shown, _ = run(gateway, "pause", "--mode", mode)
    assert code == Exit.OK
    assert [row[:2] for row in rows(shown)[1:]] == [["g0", mode], ["g1", mode]]
    assert run(gateway, "resume")[0] == Exit.OK
    assert gateway.modes == {"g0": "running", "g1": "running"}
    assert gateway.changes == [("pause", {"mode": mode}), ("resume", {})]


def test_only_the_groups_that_are_named(gateway: Any) -> None:
    code, shown, _ = run(gateway, "drain", "--group", "g1", "--json")
    assert code == Exit.OK
    assert [group["group"] for group in json.loads(shown)["groups"]] == ["g1"]
    assert gateway.modes == {"g0": "running", "g1": "drain"}
    run(gateway, "pause", "--mode", "wait", "--group", "g0", "--group", "g1")
    assert gateway.changes[-1] == ("pause", {"mode": "wait", "groups": ["g0", "g1"]})


def test_a_group_that_does_not_follow_is_named_and_is_a_failure(gateway: Any) -> None:
    gateway.silent = ("g1",)
    code, shown, _ = run(gateway, "pause", "--mode", "keep")
    assert code == Exit.FAILED
    assert "waits for: g1" in shown and "keep" in shown
    code, shown, _ = run(gateway, "pause", "--mode", "keep", "--json")
    assert code == Exit.FAILED
    assert json.loads(shown)["pending_on"] == ["g1"]


def test_what_the_gateway_refuses_is_one_sentence(gateway: Any) -> None:
    code, shown, said = run(gateway, "resume", "--group", "nobody")
    assert code == Exit.SERVER and shown == ""
    assert said == "stopway: the server says 404: no group nobody\n"


def test_facts_that_are_not_known_are_a_dash(gateway: Any) -> None:
    from stopway_cli import groups, render

    console = render.console()
    with console.capture() as captured:
        console.print(groups.screen({"groups": [{"group": "g0", "epoch": None, "running": 0}]}))
    assert rows(captured.get())[1] == ["g0", "-", "-", "0", "-", "-", "-", "-"]
