"""Settings on their way: from an InferenceService's spec to what a pod's process reads."""

from __future__ import annotations

from typing import Any

import pytest

from stopway_core import topology
from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines
from stopway_engine.config import ConfigError, PodConfig, load_config
from stopway_operator import crd, objects
from stopway_operator.config import OperatorConfig
from stopway_operator.render import engine, gateway
from stopway_operator.render.context import Context
from stopway_operator.simulation import Simulation

MODEL = {"uri": "builtin:smollm2"}
SECRET = "0123456789abcdef"
SPEC = crd.root_schema()["properties"]["spec"]["properties"]


def context(**spec: Any) -> Context:
    made = crd.InferenceServiceSpec.model_validate({"model": MODEL, **spec})
    return Context("chat", "prod", "uid-1", made, OperatorConfig())


def read(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> PodConfig:
    """What ``supervise`` makes of an environment."""
    for name, value in {"STOPWAY_SECRET": SECRET, **env}.items():
        monkeypatch.setenv(name, value)
    return load_config()


def told(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> PodConfig:
    """What the pods of a service with ``spec`` read, by way of their template."""
    made = context(**spec)
    container = engine.engine_template(made, made.pattern)["spec"]["containers"][0]
    plain = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    return read(monkeypatch, {k: v for k, v in plain.items() if k.startswith("STOPWAY_")})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, Deadlines()),
        ({"totalSeconds": 30}, Deadlines(total=30.0)),
        (
            {"queueSeconds": 0.25, "firstTokenSeconds": 2, "totalSeconds": 60},
            Deadlines(queue=0.25, first_token=2.0, total=60.0),
        ),
    ],
)
def test_deadlines_reach_the_pods(
    given: dict[str, float], wanted: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(monkeypatch, stop={"deadlines": given}).deadlines == wanted


def test_speculation_and_grammars_reach_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    default = told(monkeypatch)
    assert (default.draft_tokens, default.grammars) == (0, 32)
    config = told(monkeypatch, speculation={"draftTokens": 4}, engine={"grammars": 100})
    assert (config.draft_tokens, config.grammars) == (4, 100)


def test_the_environment_has_these_names() -> None:
    made = context(
        stop={"deadlines": {"queueSeconds": 1, "firstTokenSeconds": 2, "totalSeconds": 3.5}},
        speculation={"draftTokens": 8},
        engine={"grammars": 1},
    )
    assert {
        "STOPWAY_DEADLINE_QUEUE_S": "1.0",
        "STOPWAY_DEADLINE_FIRST_TOKEN_S": "2.0",
        "STOPWAY_DEADLINE_TOTAL_S": "3.5",
        "STOPWAY_DRAFT_TOKENS": "8",
        "STOPWAY_GRAMMARS": "1",
    }.items() <= made.pattern.pods[0].base_env.items()


def test_defaults_are_alike_wherever_they_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, config = topology.EngineSettings(), read(monkeypatch, {})
    for name in topology.EngineSettings.__dataclass_fields__:
        assert getattr(config, name) == getattr(settings, name), name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"stop": {"deadlines": {"queueSeconds": 0}}}, "spec.stop.deadlines.queueSeconds: "),
        ({"stop": {"deadlines": {"totalSeconds": -1}}}, "greater than 0"),
        ({"stop": {"deadlines": {"firstTokenSeconds": 1e9}}}, "less than or equal to 86400"),
        ({"stop": {"deadlines": {"queueSeconds": "soon"}}}, "valid number"),
        ({"stop": {"policy": "nobody"}}, "'native'"),
        ({"speculation": {"draftTokens": 9}}, "spec.speculation.draftTokens: "),
        ({"speculation": {"draftTokens": -1}}, "greater than or equal to 0"),
        ({"engine": {"grammars": 0}}, "spec.engine.grammars: "),
        ({"engine": {"grammars": 1025}}, "less than or equal to 1024"),
    ],
)
def test_what_cannot_work_is_told_in_the_status(spec: dict[str, Any], message: str) -> None:
    simulation = Simulation()
    simulation.create("chat", {"model": MODEL})["spec"] |= spec  # past the API server's checks
    assert not simulation.reconcile().writes
    assert simulation.service is not None
    degraded = objects.condition_of(simulation.service, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert message in degraded["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEADLINE_QUEUE_S", "-1"),
        ("DEADLINE_FIRST_TOKEN_S", "nan"),
        ("DEADLINE_TOTAL_S", "inf"),
        ("DRAFT_TOKENS", "9"),
        ("DRAFT_TOKENS", "some"),
        ("GRAMMARS", "0"),
        ("GRAMMARS", "1025"),
    ],
)
def test_a_pod_refuses_what_cannot_work_by_its_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"^STOPWAY_{name}: Input should be"):
        read(monkeypatch, {f"STOPWAY_{name}": value})


def test_only_what_ranks_must_have_alike_is_in_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = told(monkeypatch).fingerprint("w", "b")
    assert told(monkeypatch, engine={"grammars": 33}).fingerprint("w", "b") != base
    leaders = {"stop": {"deadlines": {"totalSeconds": 9}}, "speculation": {"draftTokens": 3}}
    assert told(monkeypatch, **leaders).fingerprint("w", "b") == base


NEW_PODS = [
    {"stop": {"deadlines": {"queueSeconds": 5}}},
    {"stop": {"deadlines": {"firstTokenSeconds": 5}}},
    {"stop": {"deadlines": {"totalSeconds": 5}}},
    {"stop": {"policy": "vllm"}},
    {"speculation": {"draftTokens": 2}},
    {"engine": {"grammars": 64}},
]


@pytest.mark.parametrize("change", NEW_PODS, ids=str)
def test_a_change_needs_new_pods_and_no_new_gateway(change: dict[str, Any]) -> None:
    before, after = context(), context(**change)
    assert engine.revision(after) != engine.revision(before)
    assert gateway.gateway_objects(after) == gateway.gateway_objects(before)


def test_a_change_replaces_group_after_group() -> None:
    simulation = Simulation()
    pair = {"tensor": 2, "ranksPerPod": 1}
    simulation.create("chat", {"model": MODEL, "parallelism": pair, "replicas": 2})
    simulation.settle()
    before = {name: objects.uid_of(pod) for name, pod in simulation.pods.items()}
    simulation.change(speculation={"draftTokens": 4}, stop={"deadlines": {"totalSeconds": 20}})
    fewest = 2
    for _ in range(60):
        simulation.reconcile()
        simulation.tick()
        assert simulation.service is not None
        fewest = min(fewest, simulation.service["status"]["readyReplicas"])
    simulation.settle()
    assert fewest == 1
    replaced = {n for n, pod in simulation.pods.items() if objects.uid_of(pod) != before[n]}
    assert replaced == {"chat-g0-0", "chat-g0-1", "chat-g1-0", "chat-g1-1"}
    for name in replaced:
        env = simulation.pods[name]["spec"]["containers"][0]["env"]
        values = {entry["name"]: entry.get("value") for entry in env}
        assert values["STOPWAY_DRAFT_TOKENS"] == "4"
        assert values["STOPWAY_DEADLINE_TOTAL_S"] == "20.0"


def test_every_policy_that_the_engine_has_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SPEC["stop"]["properties"]["policy"]["enum"] == list(POLICIES)
    for name in POLICIES:
        assert told(monkeypatch, stop={"policy": name}).policy == name


def test_the_schema_bounds_them() -> None:
    deadlines = SPEC["stop"]["properties"]["deadlines"]
    assert set(deadlines["properties"]) == {"queueSeconds", "firstTokenSeconds", "totalSeconds"}
    for bound in deadlines["properties"].values():
        assert bound["type"] == "number" and "default" not in bound
        # Kubernetes has the flag of OpenAPI 3.0, not the number of JSON Schema.
        assert (bound["minimum"], bound["exclusiveMinimum"]) == (0, True)
    draft = SPEC["speculation"]["properties"]["draftTokens"]
    assert (draft["minimum"], draft["maximum"], draft["default"]) == (0, 8, 0)
    grammars = SPEC["engine"]["properties"]["grammars"]
    assert (grammars["minimum"], grammars["maximum"], grammars["default"]) == (1, 1024, 32)
