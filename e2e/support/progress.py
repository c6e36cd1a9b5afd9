"""Saying what a test waits for, past pytest's capture."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")

# pytest_configure puts pytest's own "no capture" here.
uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext


class NotInTime(AssertionError):
    """A condition did not come true within its bound."""


def say(text: str) -> None:
    with uncaptured():
        print(f"e2e: {text}", file=sys.stderr, flush=True)


def wait_for(
    what: str,
    check: Callable[[], T],
    seconds: float,
    *,
    every: float = 0.3,
    remind: float = 10.0,
) -> T:
    """The first true value of `check()`; `NotInTime` after `seconds`.

    An exception of `check` counts as "not yet": what is asked may be down or gone for a moment.
    A wait of more than `remind` seconds says so, with the last value or error.
    """
    start = time.monotonic()
    reminded = start
    while True:
        seen: object
        try:
            value = check()
            seen = value
            if value:
                if reminded > start:
                    say(f"{what}: after {time.monotonic() - start:.1f} s")
                return value
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if now - start > seconds:
            raise NotInTime(f"waited {seconds:.0f} s in vain: {what}; last seen: {_short(seen)}")
        if now - reminded > remind:
            reminded = now
            say(f"waiting {now - start:.0f} of {seconds:.0f} s: {what} (now: {_short(seen)})")
        time.sleep(every)


def stays(what: str, check: Callable[[], object], seconds: float, *, every: float = 0.3) -> None:
    """Fails as soon as `check()` is false within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = check()
        if not value:
            raise AssertionError(f"it did not stay so: {what} (now: {_short(value)})")
        time.sleep(every)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
