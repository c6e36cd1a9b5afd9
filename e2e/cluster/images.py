"""The images of the test cluster, made here: there is no registry to pull from.

One Debian base with Python and Redis serves them all. Stopway's own images are that base with the
entry points of images/*; their Python packages reach the pods by a hostPath (see `venv`).
The archives are imported once into a containerd root (`STORE`), which each node clones by hard
links: 0.1 s and no disk.
"""

import json
import re
import shutil
from pathlib import Path

from cluster.archive import PATH, Image, write
from cluster.build import PROGRAMS
from cluster.paths import CLUSTER, IMAGES, ROOT, STORE, VENV_IN_POD
from cluster.shell import digest, is_current, mark_current, run, waiting

ARCHIVE = IMAGES / "images.tar"
ROOTS = IMAGES / "root"
DEBIAN, PAUSE, JAEGER = ROOTS / "debian", ROOTS / "pause", ROOTS / "jaeger"
DEBIAN_PACKAGES = "python3,libstdc++6,libgomp1,procps,iproute2,curl,redis-server"
SUITE = "bookworm"

PARTS = ("engine", "gateway", "operator")
TAGS = ("e2e", "e2e-next")  # the second is the same again: what a rollout goes to


def images() -> None:
    """Makes the images that are not up to date, and the store from them."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    (jaeger,) = (program for program in PROGRAMS if program.name == "jaeger")
    writer = CLUSTER / "archive.py"
    key = digest([_debian(), _pause(), jaeger.key, writer, *map(repr, _all())])
    if is_current(STORE, key):
        return
    (JAEGER / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy2(jaeger.path, JAEGER / "usr/local/bin/jaeger")
    with waiting("writing the images and importing them into a containerd root"):
        write(ARCHIVE, _all())
        shutil.rmtree(STORE, ignore_errors=True)
        STORE.mkdir()
        isolated = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        run(*isolated, "bash", "-euc", _IMPORT, "import", STORE, ARCHIVE)
        ARCHIVE.unlink()
    mark_current(STORE, key)


def _all() -> list[Image]:
    return [
        Image("localhost/pause:1", (PAUSE,), entrypoint=("/pause",)),
        Image("localhost/debian:12", (DEBIAN,)),
        Image("localhost/redis:e2e", (DEBIAN,), entrypoint=("redis-server",)),
        Image("localhost/jaeger:e2e", (DEBIAN, JAEGER), entrypoint=("jaeger",)),
        *(_stopway(part, tag) for part in PARTS for tag in TAGS),
    ]


def _stopway(part: str, tag: str) -> Image:
    """Runs what the real image runs, as the same user, with the python of the hostPath."""
    text = (ROOT / "images" / part / "Containerfile").read_text()
    entrypoint = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.M)
    user = re.search(r"^USER (\S+)$", text, re.M)
    assert entrypoint is not None and user is not None, f"images/{part} has no ENTRYPOINT or USER"
    return Image(
        f"localhost/stopway-{part}:{tag}",
        (DEBIAN,),
        entrypoint=tuple(json.loads(entrypoint[1])),
        env={
            "PATH": f"{VENV_IN_POD}/bin:{PATH}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "STOPWAY_E2E_TAG": tag,
        },
        user=user[1],
    )


def _pause() -> str:
    """Compiles the program; what it was made from."""
    key = digest([CLUSTER / "pause.c"])
    if not is_current(PAUSE, key):
        PAUSE.mkdir(parents=True, exist_ok=True)
        run("cc", "-Os", "-static", "-s", "-o", PAUSE / "pause", CLUSTER / "pause.c")
        mark_current(PAUSE, key)
    return key


def _debian() -> str:
    """Makes the base that all images share; what it was made from."""
    key = digest([SUITE, DEBIAN_PACKAGES])
    if not is_current(DEBIAN, key):
        with waiting("making a Debian root for the images"):
            shutil.rmtree(DEBIAN, ignore_errors=True)
            DEBIAN.parent.mkdir(parents=True, exist_ok=True)
            include = f"--include={DEBIAN_PACKAGES}"
            run("mmdebstrap", "--quiet", "--variant=minbase", include, SUITE, DEBIAN)
        mark_current(DEBIAN, key)
    return key


_IMPORT = """
mount -t tmpfs tmpfs /run
store=$1; shift
containerd --root "$store" >"$store.log" 2>&1 & daemon=$!
for i in $(seq 300); do [ -S /run/containerd/containerd.sock ] && break; sleep 0.1; done
ctr -n k8s.io images import "$1" >/dev/null
kill "$daemon"; wait "$daemon" || true
"""


def clone(folder: Path) -> None:
    """A node's containerd root: the store's files by hard link, its databases by copy."""
    run("cp", "-al", STORE, folder)
    for database in STORE.rglob("*.db"):  # written in place
        copy = folder / database.relative_to(STORE)
        copy.unlink()
        shutil.copy2(database, copy)
