"""What ``stopway up`` is told reaches the pods as an InferenceService's spec does."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from stopway_cli import up
from stopway_cli.errors import Exit
from stopway_cli.main import app
from stopway_cli.stack import StackConfig
from stopway_core.topology import Addresses, plan
from stopway_core.types import Deadlines
from stopway_engine.config import PodConfig, load_config


def pod_config(monkeypatch: pytest.MonkeyPatch, *options: str) -> PodConfig:
    """The settings of a pod of ``stopway up OPTIONS``, from its environment; nothing is started."""
    seen: list[StackConfig] = []

    async def serve(config: StackConfig) -> Exit:
        seen.append(config)
        return Exit.OK

    monkeypatch.setattr(up, "serve", serve)
    result = CliRunner().invoke(app, ["up", *options])
    assert result.exit_code == Exit.OK, result.output
    (config,) = seen
    (group,) = plan(config.spec(config.settings))
    for name, value in group.pods[0].env(Addresses("127.0.0.1", "127.0.0.1")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STOPWAY_SECRET", "0123456789abcdef")
    return load_config()


def test_deadlines_drafts_and_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--deadline-queue 0.5 --deadline-first-token 3 --deadline-total 60"
    config = pod_config(monkeypatch, *options.split(), "--draft-tokens", "4", "--grammars", "8")
    assert config.deadlines == Deadlines(queue=0.5, first_token=3.0, total=60.0)
    assert (config.draft_tokens, config.grammars) == (4, 8)


def test_without_options_there_is_no_deadline_and_no_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = pod_config(monkeypatch)
    assert config.deadlines == Deadlines()
    assert (config.draft_tokens, config.grammars, config.policy) == (0, 32, "native")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--deadline-total inf", "inf is no number of seconds"),
        ("--deadline-queue -1", "0"),
        ("--draft-tokens 9", "8"),
        ("--grammars 1025", "1024"),
        ("--policy nobody", "none of native"),
    ],
)
def test_what_cannot_work_is_refused_by_the_options_name(options: str, message: str) -> None:
    name, value = options.split()
    result = CliRunner().invoke(app, ["up", name, value])
    assert result.exit_code == Exit.USAGE
    last = result.stderr.splitlines()[-1]
    assert f"'{name}'" in last or f" {name}:" in last
    assert re.search(rf"\b{message}\b", last)
