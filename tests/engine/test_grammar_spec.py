"""Which constraints are taken, what is said about the others, and that none of them hangs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from stopway_engine.grammar.probe import trial
from stopway_engine.grammar.spec import (
    CHECK_SECONDS_MAX,
    EXIT_MEMORY,
    PATTERN_BYTES_MAX,
    TEXT_BYTES_MAX,
    CheckError,
    GrammarError,
    canonical,
    check,
    source_of,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": PERSON},
        {"json_schema": {}},
        {"json_object": True},
        {"regex": r"[a-c]{2,5}(\d+|é)"},
        {"choice": ["yes", "no", 'a "quoted" \\ one', "día\n", "\u0000"]},
        {"lark": 'start: "a" | "b" start'},
    ],
)
def test_good_constraints(constraint):
    check(canonical(constraint))


def test_the_order_of_keys_is_the_clients():
    assert canonical({"json_schema": {"z": 1, "a": 2}}) == '{"json_schema":{"z":1,"a":2}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "exactly one key"),
        ("{}", "exactly one key"),
        ('{"regex": "a", "lark": "start: A"}', "exactly one key"),
        ('{"ebnf": "x"}', "no kind of constraint"),
        ('{"json_schema": "x"}', "a JSON Schema"),
        ('{"json_object": false}', "json_object is true"),
        ('{"regex": ""}', "not empty"),
        ('{"regex": "[a-"}', "unclosed character class"),
        ('{"choice": []}', "1 to"),
        ('{"choice": [""]}', "not empty"),
        ('{"choice": [1]}', "not empty"),
        ('{"lark": "start: foo"}', "foo"),
        ('{"lark": "\\ud800"}', "not JSON"),
        ('{"json_schema": {"type": "text"}}', "text"),
        ('{"json_schema": {"$ref": "https://example.com/x"}}', "does not fetch"),
        ('{"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}', "NoExt"),
        ('{"json_schema": ' + "[" * 200_000, "longer than"),
        ('{"json_schema": ' + "[" * 60_000, "not JSON"),
    ],
)
def test_bad_constraints(text, message):
    with pytest.raises(GrammarError, match=message):
        check(text)


def test_what_is_not_json_has_no_text():
    for value in (float("nan"), {1, 2}):
        with pytest.raises(GrammarError, match="not JSON"):
            canonical({"json_schema": {"const": value}})


def test_sizes_are_bounded():
    for kind in ("regex", "lark"):
        with pytest.raises(GrammarError, match=f"{kind} is longer"):
            source_of(canonical({kind: "a" * (PATTERN_BYTES_MAX + 1)}))
    with pytest.raises(GrammarError, match="choice is a list"):
        source_of(canonical({"choice": ["a"] * 1001}))
    with pytest.raises(GrammarError, match="longer than"):
        source_of(canonical({"json_schema": {"const": "é" * (TEXT_BYTES_MAX // 2)}}))


@pytest.mark.parametrize(
    "constraint",
    [
        # Whether an intersection is empty is found out in exponential time.
        {"lark": "start: T\nT: " + " & ".join(f"/.*x{i}.*/" for i in range(30))},
        {"lark": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40))},
        {"lark": "start: " + "(" * 4000 + '"a"' + ")" * 4000},
        {"regex": "(" * 4000 + "a" + ")" * 4000},
        {"regex": "a?" * 4000},
        {"json_schema": nested(400)},
        {"json_schema": {"allOf": [{"type": "string", "pattern": f"x{i}"} for i in range(40)]}},
        {
            "json_schema": {
                "type": "object",
                "patternProperties": {f".*x{i}.*": {"type": "integer"} for i in range(30)},
            }
        },
        {
            "json_schema": {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        },
    ],
    ids=lambda constraint: json.dumps(constraint)[:40],
)
def test_hostile_constraints_end_in_a_bounded_error(constraint):
    started = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        check(canonical(constraint))
    assert time.monotonic() - started < CHECK_SECONDS_MAX + 5  # a promise: a bound on the check
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_trial_takes_a_walk():
    assert trial(source_of('{"regex": "[ab]{100}"}')) == ""
    assert "NoExtension" in trial(source_of(canonical({"json_schema": {"$ref": "#"}})))


@pytest.fixture
def probes(monkeypatch):
    """What the probes are to do, in their order, instead of running; how they were called."""
    outcomes, calls = [], []

    def run(command, **options):
        calls.append(options)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess(command, outcome, b"", b"")

    monkeypatch.setattr(subprocess, "run", run)
    return outcomes, calls


@pytest.mark.parametrize(
    "failure", [subprocess.TimeoutExpired("probe", 5), 1, -signal.SIGKILL, -signal.SIGTERM]
)
def test_a_check_that_failed_says_nothing_about_its_grammar(probes, failure):
    outcomes, calls = probes
    outcomes += [failure, 0]
    text = canonical({"regex": f"busy {failure}"})
    with pytest.raises(CheckError, match="send the request again"):
        check(text)
    check(text)  # tried anew, and good
    check(text)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "code", [-signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, EXIT_MEMORY], ids=str
)
def test_what_the_limits_end_is_the_grammars_fault_and_remembered(probes, code):
    outcomes, calls = probes
    outcomes.append(code)
    for _ in range(2):
        with pytest.raises(GrammarError, match="too much time or memory"):
            check(canonical({"regex": f"hostile {code}"}))
    assert len(calls) == 1


def test_the_probe_is_told_no_secret(probes, monkeypatch):
    monkeypatch.setenv("STOPWAY_SECRET", "s")
    monkeypatch.setenv("STOPWAY_REDIS_URL", "redis://:password@redis")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    outcomes, calls = probes
    outcomes.append(0)
    check(canonical({"regex": "secret"}))
    assert calls[0]["env"] == {"PATH": os.environ["PATH"], "PYTHONPATH": "somewhere"}


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("open('/dev/null')", 24),
        ("os.write(file, b'x')", 27),
        ("bytearray(2 << 30)", EXIT_MEMORY),
        ("[0 for _ in iter(int, 1)]", -signal.SIGXCPU),
    ],
    ids=["files", "writes", "memory", "time"],
)
def test_the_probe_bounds_itself(tmp_path, act, code):
    program = f"""
import os, sys
from stopway_engine.grammar import probe
file = os.open({str(tmp_path / "file")!r}, os.O_WRONLY | os.O_CREAT)
probe.trial = lambda _: {act}
try:
    probe.main()
except OSError as error:
    sys.exit(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == code
