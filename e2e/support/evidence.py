"""What is kept of a failed test: objects, events and logs of its namespace."""

import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from cluster.paths import CACHE

from support.kubectl import Kubectl, KubectlError, name_of

FAILURES = CACHE / "failures"
FAILED = pytest.StashKey[bool]()  # of a test: so that its fixtures leave nothing of it to others

_QUESTIONS = {
    "nodes.txt": ("get", "nodes", "-o", "wide"),
    "objects.txt": ("get", "all,endpointslices,pdb", "-o", "wide"),
    "events.txt": ("get", "events", "--sort-by=.lastTimestamp"),
    "pods.txt": ("describe", "pods"),
    "services.yaml": ("get", "inferenceservices.serving.stopway.dev", "-o", "yaml"),
}


def keep(kubectl: Kubectl, test: str) -> Path:
    """Writes it to a folder of the test's name, and returns that."""
    folder = FAILURES / re.sub(r"[^A-Za-z0-9_.-]+", "_", test)
    folder.mkdir(parents=True, exist_ok=True)
    for file, question in _QUESTIONS.items():
        (folder / file).write_text(_ask(kubectl, *question))
    with suppress(KubectlError, subprocess.TimeoutExpired):
        for pod in kubectl.objects("pods"):
            name = name_of(pod)
            (folder / f"{name}.log").write_text(_logs(kubectl, name))
            if any(c["restartCount"] for c in pod["status"].get("containerStatuses", [])):
                (folder / f"{name}.previous.log").write_text(_logs(kubectl, name, "-p"))
    return folder


def _logs(kubectl: Kubectl, pod: str, *arguments: str) -> str:
    return _ask(kubectl, "logs", pod, "--all-containers", "--prefix", "--timestamps", *arguments)


def _ask(kubectl: Kubectl, *arguments: str) -> str:
    try:
        return kubectl(*arguments, timeout_s=20)
    except (KubectlError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"
