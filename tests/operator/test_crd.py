"""The CRD is what the operator's models say, and covers all that the operator writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stopway_operator import crd, manifests
from stopway_operator.simulation import Simulation

ROOT = Path(__file__).parents[2]
SCHEMA = crd.root_schema()
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))


@pytest.mark.parametrize("path", sorted(manifests.files()))
def test_what_is_committed_is_what_the_models_say(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text == manifests.files()[path], "run `python -m stopway_operator.manifests`"


def test_the_chart_has_the_same_crd() -> None:
    chart = (ROOT / "charts/stopway/templates/crd.yaml").read_text(encoding="utf-8")
    body = "\n".join(line for line in chart.splitlines() if not line.startswith("{{"))
    found = yaml.safe_load(body)
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found == yaml.safe_load((ROOT / "manifests/00-crd.yaml").read_text(encoding="utf-8"))


def nodes(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += nodes(schema[key], f"{path}[]")
    return found


def test_the_schema_is_structural_and_described() -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "title", "nullable"}
    for path, node in nodes(SCHEMA):
        assert not forbidden & set(node), path
        assert "type" in node, path
        assert node.get("exclusiveMinimum", True) is True, path
        if path.startswith((".spec", ".status")) and not path.endswith("[]"):
            assert node.get("description"), path
        if node["type"] == "object" and path not in ("", ".metadata"):
            known = ("properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields")
            assert any(key in node for key in known), path
        if node["type"] == "array":
            assert "items" in node, path


def test_every_path_in_a_rule_exists_and_is_always_there_or_asked_for() -> None:
    rules = [
        (path, node, rule)
        for path, node in nodes(SCHEMA)
        for rule in node.get("x-kubernetes-validations", ())
    ]
    assert len(rules) == 3
    for path, node, rule in rules:
        assert rule["message"]
        text = rule["rule"]
        for found in re.findall(r"\b(?:self|oldSelf)\.([A-Za-z.]+)", text):
            name = found.split(".")[0]
            if name == "metadata":
                assert path == ""
                continue
            assert name in node["properties"], (path, found)
            always = "default" in node["properties"][name] or name in node.get("required", ())
            assert always or f"has(self.{name})" in text, (path, found)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "per_pod", "fits"),
    [(2, 2, 0, True), (2, 2, 1, True), (2, 2, 4, True), (2, 2, 3, False), (1, 1, 2, False)],
)
def test_the_rule_of_ranks_per_pod(tensor: int, pipeline: int, per_pod: int, fits: bool) -> None:
    (rule,) = SCHEMA["properties"]["spec"]["properties"]["parallelism"]["x-kubernetes-validations"]
    text = rule["rule"].replace("||", "or").replace("self.", "")
    names = {"tensor": tensor, "pipeline": pipeline, "ranksPerPod": per_pod}
    assert eval(text, {}, names) is fits  # the rule's few operators mean the same in Python


@pytest.mark.parametrize(
    ("uri", "fits"),
    [
        ("builtin:smollm2", True),
        ("pvc://models/llama/8b.gguf", True),
        ("hostpath:/data/models/llama", True),
        ("builtin:", False),
        ("pvc://models", False),
        ("hostpath:/data/../etc", False),
        ("hostpath:relative", False),
        ("https://example.com/model", False),
        ("/data/model", False),
    ],
)
def test_model_uris(uri: str, fits: bool) -> None:
    assert bool(re.search(crd.URI_PATTERN, uri)) is fits


@pytest.mark.parametrize(
    "name,fits", [("chat", True), ("7b", False), ("a.b", False), ("a-", False)]
)
def test_names_are_dns_labels(name: str, fits: bool) -> None:
    pattern = re.search(r"matches\('(.*)'\)", SCHEMA["x-kubernetes-validations"][0]["rule"])
    assert pattern is not None and bool(re.search(pattern[1], name)) is fits


def test_defaults_of_the_schema_are_those_of_the_models() -> None:
    given = {"model": {"uri": "builtin:smollm2"}}
    filled = _defaulted(given, SCHEMA["properties"]["spec"])
    made = crd.InferenceServiceSpec.model_validate(given)
    assert crd.InferenceServiceSpec.model_validate(filled) == made
    value = made.model_dump(by_alias=True, exclude_none=True)
    assert _scalars(filled) == _scalars(value)


def _scalars(value: Any, path: str = "") -> dict[str, Any]:
    """Everything that is not empty."""
    if not isinstance(value, dict):
        return {} if value in ([], "") else {path: value}
    return {k: v for n, child in value.items() for k, v in _scalars(child, f"{path}.{n}").items()}


def _defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """As the API server fills in defaults."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = dict(value)
    for name, child in schema["properties"].items():
        if name not in filled and "default" in child:
            filled[name] = child["default"]
        if name in filled:
            filled[name] = _defaulted(filled[name], child)
    return filled


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_samples_fit_the_schema(path: Path) -> None:
    for sample in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        assert sample["apiVersion"] == crd.API_VERSION and sample["kind"] == crd.KIND
        assert _unknown(sample["spec"], SCHEMA["properties"]["spec"]) == []
        simulation = Simulation()
        simulation.create(sample["metadata"]["name"], sample["spec"])
        assert simulation.plan().status is not None


def test_all_that_is_written_to_the_status_is_in_the_schema() -> None:
    """o03: the API server prunes what the schema does not have, silently."""
    simulation = Simulation(capacity={"n1": 3})
    spec = {"model": {"uri": "builtin:smollm2"}, "parallelism": {"tensor": 2, "ranksPerPod": 1}}
    simulation.create("chat", {**spec, "replicas": 2})
    seen = 0
    for _ in range(60):
        planned = simulation.reconcile()
        if planned.status is not None:
            seen += 1
            assert _unknown(planned.status, SCHEMA["properties"]["status"]) == []
            assert _missing(planned.status, SCHEMA["properties"]["status"]) == []
        simulation.tick(5)
    assert seen > 3


def _unknown(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    if isinstance(value, list):
        return [bad for item in value for bad in _unknown(item, schema["items"], f"{path}[]")]
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if "additionalProperties" in schema:
        return []
    bad = [f"{path}.{name}" for name in value if name not in schema["properties"]]
    for name, child in schema["properties"].items():
        if name in value:
            bad += _unknown(value[name], child, f"{path}.{name}")
    return bad


def _missing(value: Any, schema: dict[str, Any]) -> list[str]:
    if isinstance(value, list):
        return [bad for item in value for bad in _missing(item, schema["items"])]
    if not isinstance(value, dict):
        return []
    bad = [name for name in schema.get("required", ()) if name not in value]
    for name, child in schema.get("properties", {}).items():
        if name in value:
            bad += _missing(value[name], child)
    return bad
