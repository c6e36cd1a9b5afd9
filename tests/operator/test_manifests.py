"""What is installed: parses, grants what is needed and no more, and the chart says the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stopway_operator import kinds, manifests, objects
from stopway_operator.config import PREFIX, OperatorConfig, load_config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/stopway"
FILES = sorted((ROOT / "manifests").rglob("*.yaml"))


def documents(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_parse(path: Path) -> None:
    found = documents(path.read_text(encoding="utf-8"))
    assert found
    for obj in found:
        assert obj["apiVersion"] and obj["kind"] and obj["metadata"]["name"]


def test_the_operator_may_do_what_it_does_and_no_more() -> None:
    rules = [*manifests.namespaced_rules(), *manifests.cluster_rules()]
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for kind in kinds.WATCHED:
        assert {"list", "watch"} <= granted[kind.group, kind.plural]
    for kind in kinds.APPLIED:
        assert {"get", "create", "patch", "delete"} <= granted[kind.group, kind.plural]
    assert granted["", "secrets"] == {"get", "create"}
    assert granted["", "nodes"] == {"get", "list", "watch"}
    assert granted["", "pods"] == {"get", "list", "watch", "delete"}
    service = (kinds.SERVICE.group, kinds.SERVICE.plural)
    assert not granted[service] & {"create", "update", "patch", "delete"}
    assert not any("*" in (*key, *verbs) for key, verbs in granted.items())


def test_the_operators_deployment_is_what_the_program_reads() -> None:
    (container,) = manifests.deployment()["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "stopway-system") for entry in container["env"]}
    assert all(name.startswith(PREFIX) for name in given)
    assert load_config(given) == OperatorConfig()
    (port,) = container["ports"]
    assert port["containerPort"] == OperatorConfig().health_port


def test_the_operator_is_not_pid_1_which_misses_a_sigterm_at_its_start() -> None:
    pod = manifests.deployment()["spec"]["template"]["spec"]
    text = (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    assert pod["shareProcessNamespace"] is True
    assert re.search(r"^      shareProcessNamespace: true\b", text, re.MULTILINE)


def test_policies_let_the_operator_in_by_its_label() -> None:
    labels = manifests.deployment()["spec"]["template"]["metadata"]["labels"]
    assert labels[objects.LABEL_NAME] == objects.MANAGER
    text = (CHART / "templates/_helpers.tpl").read_text(encoding="utf-8")
    assert f"{objects.LABEL_NAME}: {objects.MANAGER}" in text


def test_the_charts_rules_are_the_manifests() -> None:
    text = (CHART / "templates/_rules.tpl").read_text(encoding="utf-8")
    blocks = re.findall(r'define "([^"]*)" }}\n(.*?)\n{{- end', text, re.DOTALL)
    found = {name: yaml.safe_load(body) for name, body in blocks}
    assert found == {
        "stopway.rules": manifests.namespaced_rules(),
        "stopway.clusterRules": manifests.cluster_rules(),
        "stopway.editRules": manifests.edit_rules(),
    }


def test_the_charts_values_are_those_of_their_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    _same_keys(values, schema)
    used = set()
    for template in (CHART / "templates").iterdir():
        used |= set(re.findall(r"\.Values\.([A-Za-z]+)", template.read_text(encoding="utf-8")))
    assert used == set(values)


def _same_keys(values: dict[str, Any], schema: dict[str, Any]) -> None:
    known = set(schema["properties"]) - {"global"}
    assert set(values) == known
    for name, child in schema["properties"].items():
        if "properties" in child:
            _same_keys(values[name], child)


def test_the_chart_names_the_environment_of_the_program() -> None:
    text = (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    names = set(re.findall(rf"{PREFIX}[A-Z_]+", text))
    given = dict.fromkeys(names, "7")
    config = load_config(given)
    assert config.namespace == config.images.engine == "7" and config.resync_s == 7.0


def helm() -> str:
    found = os.environ.get("STOPWAY_HELM") or shutil.which("helm")
    if not found:
        pytest.skip("no helm here (PATH, STOPWAY_HELM): the end-to-end tests lint and install")
    return found


def render(*arguments: str) -> list[dict[str, Any]]:
    command = [helm(), "template", "stopway", str(CHART), "--namespace", "stopway-system"]
    command += ["--kube-version", "1.34"]  # a helm of one's own making takes itself for 1.20
    text = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
    return documents(text.stdout)


def test_the_chart_is_clean() -> None:
    subprocess.run([helm(), "lint", "--strict", str(CHART)], check=True, capture_output=True)


def test_the_chart_renders_what_the_manifests_have() -> None:
    found = {(obj["kind"], obj["metadata"]["name"]): obj for obj in render()}
    plain = {
        (o["kind"], o["metadata"]["name"]): o for o in [*manifests.rbac(), manifests.deployment()]
    }
    name = objects.MANAGER
    mine = sorted(map(str, plain["ClusterRole", name]["rules"]))
    assert sorted(map(str, found["ClusterRole", name]["rules"])) == mine
    (theirs,) = found["Deployment", name]["spec"]["template"]["spec"]["containers"]
    (ours,) = plain["Deployment", name]["spec"]["template"]["spec"]["containers"]
    for key in ("image", "args", "ports", "livenessProbe", "readinessProbe", "securityContext"):
        assert theirs[key] == ours[key], key
    assert {e["name"] for e in ours["env"]} <= {e["name"] for e in theirs["env"]}


def test_the_chart_for_some_namespaces() -> None:
    found = render("--set", "watchNamespaces={a,b}", "--set", "serviceMonitor.enabled=true")
    roles = [obj["metadata"]["namespace"] for obj in found if obj["kind"] == "Role"]
    assert roles == ["a", "b"]
    cluster, _ = [obj for obj in found if obj["kind"] == "ClusterRole"]
    assert cluster["rules"] == manifests.cluster_rules()
    deployment = next(obj for obj in found if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--namespace=a", "--namespace=b"]
    assert {"ServiceMonitor", "PodMonitor"} <= {obj["kind"] for obj in found}


@pytest.mark.parametrize("part", ["engine", "gateway", "operator"])
def test_images_run_their_part_as_nobody_in_particular(part: str) -> None:
    text = (ROOT / f"images/{part}/Containerfile").read_text(encoding="utf-8")
    assert text.count("ARG BASE=") == 1 and "FROM ${BASE}" in text
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert f"'.[{part}]'" in text and "-c constraints.txt" in text
    assert not re.search(r"\b(curl|wget)\b", text)
    for source in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists(), path
