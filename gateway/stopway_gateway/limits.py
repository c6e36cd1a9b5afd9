"""What is checked before anything is parsed or computed: JSON text, numbers, ids."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from stopway_core import names
from stopway_gateway.errors import ApiError

_DEPTH_MAX = 64
_TOO_DEEP = f"is nested deeper than {_DEPTH_MAX}."
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes, what: str = "The body", param: str | None = None) -> dict[str, Any]:
    """The JSON object in ``body``; else a 400 that says what is wrong with it.

    NaN, infinities, numbers that overflow, lone surrogates and deep nesting are refused here, so
    that nothing behind this has to think of them.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError:
        raise _bad(f"{what} is not UTF-8.", param) from None
    except RecursionError:
        raise _bad(f"{what} {_TOO_DEEP}", param) from None
    except ValueError as error:
        raise _bad(f"{what} is not JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise _bad(f"{what} must be a JSON object.", param)
    if _too_deep(value):
        raise _bad(f"{what} {_TOO_DEEP}", param)
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = f"{what} has half of a surrogate pair, which is no character."
            raise _bad(message, param) from None
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def _bad(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, code="invalid_json", param=param)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def client_request_id(raw: bytes | None) -> str:
    """The client's own ``x-request-id``, kept but never used to address. Raises a 400."""
    if raw is None:
        return ""
    text = raw[: names.ID_MAX + 1].decode("latin-1")
    if not names.valid_id(text):
        raise ApiError(
            400,
            f"x-request-id must be 1 to {names.ID_MAX} of letters, digits and . _ : -",
            code="invalid_request_id",
            param="x-request-id",
        )
    return text
