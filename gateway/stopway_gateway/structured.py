"""What an answer must match: ``response_format`` or ``structured_outputs`` as one text.

The text is the identity of the grammar: a group compiles equal texts once.
"""

from __future__ import annotations

import json
from typing import Any

from stopway_gateway.limits import parse_json
from stopway_gateway.schemas import ResponseFormat, SamplingBody, StructuredOutputs, invalid

_FORMAT, _STRUCTURED = "response_format", "structured_outputs"


def grammar_of(body: SamplingBody, bytes_max: int) -> tuple[str, str]:
    """The grammar's JSON, and the body's field that it came from; two empty texts for none.

    Raises a 400 for what is too large, or contradicts another field. Whether a schema, regex or
    grammar can be compiled is for the group to say.
    """
    if body.response_format is not None and body.structured_outputs is not None:
        raise invalid(_STRUCTURED, f"not together with {_FORMAT}")
    if body.structured_outputs is not None:
        value, field = _of_structured(body.structured_outputs, bytes_max), _STRUCTURED
    elif body.response_format is not None:
        value, field = _of_format(body.response_format), _FORMAT
    else:
        return "", ""
    if not value:
        return "", ""
    if body.min_tokens:
        raise invalid("min_tokens", f"not together with {field}, which says where the answer ends")
    if body.ignore_eos:
        raise invalid("ignore_eos", f"not together with {field}, which says where the answer ends")
    # The order of keys stays: that of a schema's properties is the order of the answer's.
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if len(text.encode()) > bytes_max:
        raise _too_large(field, bytes_max)
    return text, field


def _of_format(given: ResponseFormat) -> dict[str, Any]:
    if (given.json_schema is not None) != (given.type == "json_schema"):
        raise invalid(f"{_FORMAT}.json_schema", "with type json_schema, and only with it")
    if given.json_schema is not None:
        return {"json_schema": given.json_schema.schema_}
    return {"json_object": True} if given.type == "json_object" else {}


def _of_structured(given: StructuredOutputs, bytes_max: int) -> dict[str, Any]:
    schema = given.json_
    if isinstance(schema, str):
        if len(schema) > bytes_max:
            raise _too_large(f"{_STRUCTURED}.json", bytes_max)
        schema = parse_json(schema.encode(), "The schema", f"{_STRUCTURED}.json")
    found = {
        "json_schema": schema,
        "json_object": given.json_object,
        "regex": given.regex,
        "choice": given.choice,
        "lark": given.grammar,
    }
    chosen = {name: value for name, value in found.items() if value is not None}
    if len(chosen) != 1:
        raise invalid(_STRUCTURED, "exactly one of json, json_object, regex, choice, grammar")
    return chosen


def _too_large(field: str, bytes_max: int) -> Exception:
    return invalid(field, f"must be at most {bytes_max} bytes")
