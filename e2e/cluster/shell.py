"""Running commands, saying what is waited for, and knowing what is up to date."""

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class ClusterError(Exception):
    """Something that a person has to look at; the message says what to do."""


def say(text: str) -> None:
    print(f"e2e: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, check: bool = True, quiet: bool = True, **kwargs: object) -> str:
    """The command's stdout; its stderr is in the error when it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(  # type: ignore[call-overload]
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        **kwargs,
    )
    if check and done.returncode != 0:
        tail = (done.stderr or "").strip()[-3000:]
        raise ClusterError(f"{' '.join(map(str, command))} failed ({done.returncode}): {tail}")
    return done.stdout


@contextmanager
def waiting(what: str, every_s: float = 30.0) -> Iterator[None]:
    """Says what is done, every so often that it still is, and how long it took."""
    start = time.monotonic()
    over = threading.Event()

    def remind() -> None:
        while not over.wait(every_s):
            say(f"{what}: {time.monotonic() - start:.0f} s so far")

    say(f"{what} ...")
    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    say(f"{what}: done in {time.monotonic() - start:.1f} s")


def until(
    what: str, check: Callable[[], bool], bound_s: float, hint: str = "", every_s: float = 0.1
) -> None:
    """Returns once `check()` is true; a `ClusterError` after `bound_s`."""
    deadline = time.monotonic() + bound_s
    while not check():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {bound_s:.0f} s in vain: {what}. {hint}".strip())
        time.sleep(every_s)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """One builder at a time; the file is left behind, the lock is not."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(parts: Iterable[str | Path]) -> str:
    """A digest of texts and of files' contents: what a result depends on."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()


def is_current(result: Path, key: str) -> bool:
    """Whether `result` was made from what `key` stands for."""
    stamp = stamp_of(result)
    return result.exists() and stamp.exists() and stamp.read_text() == key


def mark_current(result: Path, key: str) -> None:
    stamp_of(result).write_text(key)


def stamp_of(result: Path) -> Path:
    return result.with_name(f".{result.name}.made-from")


def in_netns(file: Path, command: Sequence[str | Path]) -> list[str]:
    """`ip netns exec` would remount /sys and hide the cgroups; nsenter does not."""
    return ["nsenter", f"--net={file}", *map(str, command)]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, **extra}
