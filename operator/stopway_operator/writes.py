"""What a plan asks to be written. One write is one request to the API server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stopway_operator import objects
from stopway_operator.kinds import Kind
from stopway_operator.objects import Obj


class Verb(StrEnum):
    """How it is written."""

    CREATE = "create"  # only if there is none
    APPLY = "apply"  # server-side
    PATCH = "patch"  # merge: a field or two of an object whose rest stays as it is
    DELETE = "delete"  # of this very object, by UID


@dataclass(frozen=True, slots=True)
class Write:
    """One write. ``uid`` is the precondition: of the object that was seen, empty for none.

    A deletion by force has one more, ``version``: of the very state that was seen.
    """

    verb: Verb
    kind: Kind
    namespace: str
    name: str
    uid: str = ""
    body: Obj = field(default_factory=dict)
    force: bool = False  # a deletion that waits for nobody
    version: str = ""  # resource version

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.name} {self.name}"


def create(kind: Kind, body: Obj) -> Write:
    return Write(Verb.CREATE, kind, objects.namespace_of(body), objects.name_of(body), body=body)


def apply(kind: Kind, body: Obj, observed: Obj | None) -> Write:
    uid = objects.uid_of(observed) if observed else ""
    return Write(Verb.APPLY, kind, objects.namespace_of(body), objects.name_of(body), uid, body)


def patch(kind: Kind, observed: Obj, changes: dict[str, Any]) -> Write:
    return Write(
        Verb.PATCH,
        kind,
        objects.namespace_of(observed),
        objects.name_of(observed),
        objects.uid_of(observed),
        changes,
    )


def delete(kind: Kind, observed: Obj, force: bool = False) -> Write:
    return Write(
        Verb.DELETE,
        kind,
        objects.namespace_of(observed),
        objects.name_of(observed),
        objects.uid_of(observed),
        force=force,
        version=str(objects.meta(observed).get("resourceVersion", "")) if force else "",
    )


@dataclass(frozen=True, slots=True)
class Notice:
    """An event for people: what happened, and what they can do."""

    reason: str
    message: str
    warning: bool = False
