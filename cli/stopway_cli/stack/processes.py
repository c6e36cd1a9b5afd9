"""Processes that are kept alive while the stack is, and are gone when it is.

Each child leads a process group of its own, so a terminal's Ctrl-C reaches only us and whatever
it started can be ended with it. Three things see to it that nothing stays: ``Supervisor.stop``,
the kernel's parent-death signal for a child, and the ``guard`` process for its whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stopway_cli.errors import CliError, Exit

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
CONFIG_EXIT = 2  # of a child: its settings cannot work; its last line says why
TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Command:
    """One process to keep running. ``stdin`` is fed to it whole at each start."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdin: bytes = b""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before restarting what died, in seconds."""

    first_s: float = 0.25
    cap_s: float = 5.0
    healthy_s: float = 30.0  # a life of this length clears the count
    start_tries: int = 4  # deaths in a row that end a stack which was never ready

    def delay_s(self, deaths: int) -> float:
        """The wait after ``deaths`` (>= 1) deaths in a row."""
        return min(self.cap_s, self.first_s * 2.0 ** min(deaths - 1, 30))


class Guard:
    """Our end of the ``guard`` process (see guard.py)."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("guard.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_ignore_signals,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}")

    def remove_at_end(self, path: Path) -> None:
        """Have ``path`` removed if we die before we can do it."""
        self._tell(f"rm {path}")

    def close(self) -> None:
        """Everything was cleaned up: the guard may go."""
        self._tell("bye")
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; the rest still works
            pipe.write(f"{line}\n".encode())
            pipe.flush()


def _ignore_signals() -> None:
    """A ``preexec_fn``: only the end of its owner ends the guard."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _die_with_parent(parent: int) -> Callable[[], None]:
    """A ``preexec_fn``: have the kernel kill this child when the thread that made it ends."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return prepare


class Child:
    """One life of one command. Its pid stays ours (a zombie at most) until ``reap``."""

    def __init__(self, command: Command, log: Path, guard: Guard) -> None:
        self.command = command
        self._guard = guard
        self._log = log
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command.argv,
                env=dict(command.env),
                stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        guard.add(self.pid)
        self._pidfd = os.pidfd_open(self.pid)
        if command.stdin and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(command.stdin)
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def exited(self) -> None:
        """Wait until it is dead, without reaping it."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._pidfd)

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the child itself, which knows what to do with its own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End all that is left of its process group. Safe: the unreaped pid is not reused."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Its return code (negative: the signal), after ending what it left behind."""
        self.kill_group()
        code = self._process.wait()
        self._guard.forget(self.pid)
        os.close(self._pidfd)
        return code

    def last_line(self) -> str:
        """The last line of this life's output that is not blank."""
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - 65536))
            lines = log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Supervisor:
    """Keeps commands running. ``failure`` resolves with the reason why it cannot go on."""

    def __init__(self, logs: Path, guard: Guard, backoff: Backoff | None = None) -> None:
        self._logs = logs
        self._guard = guard
        self._backoff = backoff or Backoff()
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping: dict[str, asyncio.Event] = {}
        self._settled = False
        self.restarts: dict[str, int] = {}
        self.failure: asyncio.Future[CliError] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """Name -> pid of what runs at this moment."""
        return {name: child.pid for name, child in self._children.items()}

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def tail(self, name: str) -> str:
        """The end of a child's log, for people."""
        try:
            text = self.log(name).read_bytes()[-65536:].decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def settled(self) -> None:
        """The stack was ready once: from now on everything is restarted for ever."""
        self._settled = True

    def start(self, command: Command) -> None:
        """Start ``command`` and keep it running."""
        self.restarts[command.name] = 0
        self._stopping[command.name] = asyncio.Event()
        child = self._spawn(command)
        task = asyncio.create_task(self._keep(command, child), name=f"keep {command.name}")
        self._tasks[command.name] = task

    async def stop(self, names: list[str], grace_s: float) -> None:
        """Ask ``names`` to end, wait up to ``grace_s``, then end them."""
        known = [name for name in names if name in self._tasks]
        for name in known:
            self._stopping[name].set()
            if name in self._children:
                self._children[name].signal(signal.SIGTERM)
        tasks = [self._tasks[name] for name in known]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=grace_s)
        if late:
            self.kill(known)
            await asyncio.wait(late)

    def kill(self, names: list[str] | None = None) -> None:
        """End ``names`` (default: all) at once, without asking; none is restarted."""
        for name in list(self._tasks) if names is None else names:
            self._stopping[name].set()
            if name in self._children:
                self._children[name].kill_group()

    def _spawn(self, command: Command) -> Child:
        try:
            child = Child(command, self.log(command.name), self._guard)
        except OSError as error:
            raise CliError(
                f"cannot start {command.name}: {error}; install Stopway again, or set PATH",
                Exit.CHILD,
            ) from None
        self._children[command.name] = child
        return child

    async def _keep(self, command: Command, child: Child) -> None:
        stopping = self._stopping[command.name]
        deaths = 0
        while True:
            born = time.monotonic()
            try:
                await child.exited()
            finally:
                del self._children[command.name]
                code = child.reap()
            if stopping.is_set():
                return
            lived_s = time.monotonic() - born
            deaths = 1 if lived_s >= self._backoff.healthy_s else deaths + 1
            problem = self._problem(child, code, deaths)
            if problem is not None:
                self._fail(problem)
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self._backoff.delay_s(deaths))
            if stopping.is_set():
                return
            self.restarts[command.name] += 1
            try:
                child = self._spawn(command)
            except CliError as error:
                self._fail(error)
                return

    def _fail(self, problem: CliError) -> None:
        if not self.failure.done():
            self.failure.set_result(problem)

    def _problem(self, child: Child, code: int, deaths: int) -> CliError | None:
        name = child.command.name
        if code == CONFIG_EXIT:
            line = child.last_line()
            return CliError(line or f"{name} refused its settings; see its log", Exit.CONFIG)
        if self._settled or deaths < self._backoff.start_tries:
            return None
        return CliError(
            f"{name} ended {deaths} times while starting ({_how(code)}); its last lines follow",
            Exit.CHILD,
            self.tail(name),
        )


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
