"""Ends what a stack leaves behind when its owner dies without a word (``kill -9``).

Runs as a process of its own, started with ``python -I -S``: only the standard library. It reads
lines from its owner: ``+PGID`` and ``-PGID`` for process groups, ``rm PATH`` for what to remove,
``bye`` for an orderly end. When the lines stop without ``bye`` the owner is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time


def main() -> None:
    """Follow the owner to its end, then clean up after it if it could not."""
    groups: set[int] = set()
    paths: list[str] = []
    for line in sys.stdin:
        line = line.rstrip("\n")
        if line == "bye":
            return
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
        elif line.startswith("rm "):
            paths.append(line[3:])
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for path in paths:
        _remove(path)


def _remove(path: str) -> None:
    for _ in range(50):  # killed processes may write for a moment more
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if not os.path.lexists(path):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main()
