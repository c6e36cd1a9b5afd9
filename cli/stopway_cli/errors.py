"""What goes wrong in front of a user: one sentence that says what to do, and an exit code."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of ``stopway`` (2 is the shell's own "wrong usage")."""

    OK = 0
    FAILED = 1  # the command ran and its answer is no: something was not reclaimed, say
    USAGE = 2
    MODEL = 3
    PORT = 4
    REDIS = 5
    CONFIG = 6  # a topology or setting that cannot work
    CHILD = 7  # a process of the stack keeps dying
    SERVER = 8  # no server there, or it refuses
    INTERRUPTED = 130


class CliError(Exception):
    """An end of the command that its user can do something about.

    ``detail`` is printed below the sentence: the tail of a log, for example.
    """

    def __init__(self, message: str, code: Exit, detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.detail = detail
