"""Whether an object must be written: never when the API server has all of it already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stopway_operator import objects
from stopway_operator.objects import Obj
from stopway_operator.render.context import quantity

_NUMBER = re.compile(r"[0-9.]+[a-zA-Z]*")
_EMPTY: tuple[Any, ...] = (None, "", [], {}, False, 0)


def stamped(wanted: Obj) -> Obj:
    """``wanted`` with a digest of itself, which tells what was removed since it was applied."""
    annotations = objects.meta(wanted).get("annotations") or {}
    mark = {objects.ANNOTATION_APPLIED: objects.digest(wanted)}
    return {
        **wanted,
        "metadata": {**wanted["metadata"], "annotations": {**annotations, **mark}},
    }


def must_apply(observed: Mapping[str, Any] | None, wanted: Obj) -> bool:
    """Whether ``wanted`` (stamped) is not there yet as it should be."""
    if observed is None:
        return True
    mark = objects.ANNOTATION_APPLIED
    if objects.annotation(observed, mark) != objects.annotation(wanted, mark):
        return True
    return not covers(observed, wanted)


def covers(observed: Any, wanted: Any) -> bool:
    """Whether all of ``wanted`` is in ``observed``, whatever defaults the API server added.

    The API server drops what is empty and writes quantities its own way.
    """
    if isinstance(wanted, dict):
        if not isinstance(observed, dict):
            return not wanted and observed is None
        return all(
            _covers_owner(observed.get(key), value)
            if key == "ownerReferences"
            else covers(observed.get(key), value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        found = observed or []
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(covers(have, want) for have, want in zip(found, wanted, strict=True))
        )
    if observed is None:
        return wanted in _EMPTY
    return observed == wanted or _same_quantity(observed, wanted)


def _covers_owner(observed: Any, wanted: list[Obj]) -> bool:
    uids = {reference.get("uid") for reference in observed or ()}
    return all(reference["uid"] in uids for reference in wanted)


def _same_quantity(one: Any, other: Any) -> bool:
    if not (_NUMBER.fullmatch(str(one)) and _NUMBER.fullmatch(str(other))):
        return False
    value = quantity(one)
    return value is not None and value == quantity(other)
