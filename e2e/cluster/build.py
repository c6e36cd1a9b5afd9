"""The programs that Debian does not package, from the Go modules pinned in tools/*/go.mod."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.paths import BIN, CACHE, TOOLS
from cluster.shell import digest, environment, is_current, lock, mark_current, run, waiting

KUBERNETES = "k8s.io/kubernetes/cmd"


@dataclass(frozen=True)
class Program:
    name: str
    module: str  # a directory of tools/
    package: str

    @property
    def path(self) -> Path:
        return BIN / self.name

    @property
    def key(self) -> str:
        folder = TOOLS / self.module
        return digest([self.package, FLAGS, *sorted(folder.iterdir())])


FLAGS = "-s -w"
PROGRAMS = (
    *(
        Program(name, "kubernetes", f"{KUBERNETES}/{name}")
        for name in (
            "kubectl",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
        )
    ),
    Program("etcd", "kubernetes", "go.etcd.io/etcd/server/v3"),
    Program("coredns", "coredns", "."),
    Program("helm", "helm", "helm.sh/helm/v3/cmd/helm"),
    Program("jaeger", "jaeger", "github.com/jaegertracing/jaeger/cmd/jaeger"),
)


def outdated() -> list[Program]:
    return [program for program in PROGRAMS if not is_current(program.path, program.key)]


def build() -> None:
    """Builds what is not up to date, one module after the other."""
    with lock(CACHE / ".build.lock"):
        BIN.mkdir(parents=True, exist_ok=True)
        for module, programs in _by_module(outdated()):
            folder = TOOLS / module
            # Each module's programs in one command share the compiled packages and both cores.
            names = ", ".join(program.name for program in programs)
            with waiting(f"downloading the Go modules of {names}"):
                run("go", "mod", "download", cwd=folder, env=_environment())
            with waiting(f"building {names} (cold: minutes)"):
                for program in programs:
                    new = program.path.with_suffix(".new")
                    run(
                        *("nice", "go", "build", "-ldflags", _ldflags(module)),
                        *("-o", new, program.package),
                        cwd=folder,
                        env=_environment(),
                    )
                    os.replace(new, program.path)
                    mark_current(program.path, program.key)


def go_wanted() -> str:
    """The newest `go` line of the modules."""
    lines = (re.search(r"^go (\S+)$", file.read_text(), re.M) for file in TOOLS.glob("*/go.mod"))
    return max((line[1] for line in lines if line), key=lambda v: [int(n) for n in v.split(".")])


def _by_module(programs: list[Program]) -> Iterator[tuple[str, list[Program]]]:
    for module in dict.fromkeys(program.module for program in programs):
        yield module, [program for program in programs if program.module == module]


@cache
def _ldflags(module: str) -> str:
    if module != "kubernetes":
        return FLAGS
    required = (TOOLS / module / "go.mod").read_text()
    version = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", required, re.M)
    assert version is not None, "tools/kubernetes/go.mod requires no k8s.io/kubernetes"
    return f"{FLAGS} -X k8s.io/component-base/version.gitVersion={version[1]}"


def _environment() -> dict[str, str]:
    flags = f"{os.environ.get('GOFLAGS', '')} -buildvcs=false -trimpath".strip()
    return environment(GOFLAGS=flags, GOTOOLCHAIN="local")
