"""Options that would have no effect beside the others: refused, so that nobody relies on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from stopway_cli.errors import CliError, Exit


@dataclass(frozen=True, slots=True)
class Idle:
    """``options`` (fields of a dataclass) do nothing ``when`` (with --x), and ``why``."""

    options: tuple[str, ...]
    when: str
    why: str


def refuse(options: Any, cases: Iterable[tuple[bool, Idle]]) -> None:
    """Check a dataclass whose fields are called as their options, and default to "not given".

    Raises ``CliError`` for the first of ``cases`` that is so and has a field that was given.
    """
    given = {
        field.name for field in fields(options) if field.default != getattr(options, field.name)
    }
    for is_so, idle in cases:
        found = [name for name in idle.options if name in given]
        if is_so and found:
            flags = " and ".join("--" + name.replace("_", "-") for name in found)
            have, them = ("has", "it") if len(found) == 1 else ("have", "them")
            raise CliError(
                f"{flags} {have} no effect {idle.when}: {idle.why}; leave {them} out", Exit.USAGE
            )
