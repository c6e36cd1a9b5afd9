"""What the kernel knows of a process and its signals."""

from __future__ import annotations

import signal
from pathlib import Path


def ignores_sigint(pid: int) -> bool:
    """Whether a SIGINT to this process is dropped."""
    (mask,) = (
        line.split()[1]
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    )
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)
