"""Where a running local stack is written down, so that other commands find it.

One file per stack, readable by its user alone (it has the key), named by the pid of its owner.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StackInfo:
    """What is needed to talk to a running stack."""

    pid: int
    born: int  # clock ticks after boot, as /proc says: a pid alone may be reused
    url: str
    key: str
    spans_dir: str
    logs_dir: str


def directory() -> Path:
    """The user's directory of running stacks."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "stopway" if runtime else Path("/tmp") / f"stopway-{os.getuid()}"


def _trusted(base: Path) -> bool:
    try:
        found = base.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and found.st_mode & 0o077 == 0


def born(pid: int) -> int:
    """When ``pid`` started, in clock ticks after boot; 0 when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def write(info: StackInfo) -> Path:
    """Register ``info``, to be given to ``remove`` at the end."""
    base = directory()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _trusted(base):
        raise PermissionError(f"{base} belongs to somebody else or is open to others")
    path = base / f"{info.pid}.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(info), file)
    return path


def remove(path: Path) -> None:
    """Take back what ``write`` returned."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other stacks are in it
        path.parent.rmdir()


def running() -> StackInfo | None:
    """The local stack of this user that was started last, if one runs."""
    base = directory()
    if not _trusted(base):
        return None
    alive: list[StackInfo] = []
    for path in base.glob("*.json"):
        try:
            info = StackInfo(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if info.born and born(info.pid) == info.born:
            alive.append(info)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return max(alive, key=lambda info: info.born, default=None)
