"""The real images of images/*/Containerfile, built here with buildah on the test cluster's base.

The tests do not need them: this shows that the files build, and that the results run.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster import packages
from cluster.archive import Image, write
from cluster.images import DEBIAN
from cluster.paths import CACHE, ROOT
from cluster.shell import environment, run, waiting

FOLDER = CACHE / "containerfiles"
BASE = "localhost/python:3.11"
# Debian's own Python takes no packages by pip; the environment in /usr/local is what a Python image
# has there.
_BASE_FILE = """
FROM localhost/debian:12
RUN apt-get -qq update \\
 && apt-get -qq install -y --no-install-recommends python3-venv ca-certificates >/dev/null \\
 && python3 -m venv /usr/local && rm -rf /var/lib/apt/lists/*
"""
# The machine's own certificate authorities and pip settings hold in the builds, too.
_HOST_FILES = ("/etc/ssl/certs", "/etc/pip.conf")


def build(parts: Sequence[str]) -> list[Path]:
    """Archives of `localhost/built-PART:e2e`, for `ctl load`."""
    packages.install(("buildah",))
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        with waiting("making the base of the real images"):
            archive = FOLDER / "debian.tar"
            write(archive, [Image("localhost/debian:12", (DEBIAN,))])
            _buildah("pull", "-q", f"docker-archive:{archive}")
            (FOLDER / "Containerfile").write_text(_BASE_FILE)
            _buildah("bud", "--network=host", "-q", "-t", BASE, FOLDER)
            archive.unlink()
        return [_build(part) for part in parts]
    finally:
        _buildah("rm", "--all")
        _buildah("rmi", "--all", "--force")
        shutil.rmtree(FOLDER / "storage", ignore_errors=True)


def _build(part: str) -> Path:
    name, archive = f"localhost/built-{part}:e2e", FOLDER / f"{part}.tar"
    volumes = [f"--volume={file}:{file}:ro" for file in _HOST_FILES if Path(file).exists()]
    with waiting(f"building images/{part}/Containerfile"):
        _buildah(
            *("bud", "--network=host", "-q", *volumes, "--build-arg", f"BASE={BASE}"),
            *("-f", ROOT / "images" / part / "Containerfile", "-t", name, ROOT),
        )
        _buildah("push", "-q", name, f"docker-archive:{archive}:{name}")
    return archive


def _buildah(*arguments: str | Path) -> None:
    storage = FOLDER / "storage"
    run(
        *("nice", "buildah", "--root", storage / "root", "--runroot", storage / "run"),
        *("--storage-driver", "overlay", *arguments),
        env=environment(BUILDAH_ISOLATION="chroot"),
    )
