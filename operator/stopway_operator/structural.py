"""From a pydantic model to the structural OpenAPI v3 schema that a CRD needs.

Kubernetes allows no references, no titles, no numeric ``exclusiveMinimum``, and fills in the
defaults of an absent object only where that object itself has a default. So references are
inlined, unions with ``null`` become plain optional fields, an exclusive minimum is a minimum with
a flag, and nested models that have all their defaults get the default ``{}``.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = (
    "description",
    "type",
    "format",
    "enum",
    "pattern",
    "default",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
)


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of ``model``. Raises ``TypeError`` for what has no such form."""
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(source, source.get("$defs", {}))


def _convert(node: Schema, defs: Schema) -> Schema:
    node = _resolved(node, defs)
    out: Schema = {key: node[key] for key in _KEPT if key in node}
    out |= {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}
    if out.get("default", ...) in (None, ""):
        del out["default"]  # the models fill it in, and objects stay readable
    if "exclusiveMinimum" in node:
        out |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if "x-kubernetes-int-or-string" in out:
        out.pop("type", None)
        return out
    if "properties" in node:
        out["properties"] = {
            name: _property(name, child, node, defs) for name, child in node["properties"].items()
        }
        if node.get("required"):
            out["required"] = list(node["required"])
    extra = node.get("additionalProperties")
    if isinstance(extra, dict):
        out["additionalProperties"] = _convert(extra, defs)
    elif extra is True and "properties" not in node:
        out["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        out["items"] = _convert(node["items"], defs)
    if "type" not in out:
        raise TypeError(f"no structural form for {node!r}")
    return out


def _property(name: str, child: Schema, parent: Schema, defs: Schema) -> Schema:
    out = _convert(child, defs)
    nullable = any(part.get("type") == "null" for part in child.get("anyOf", ()))
    optional = name not in parent.get("required", ())
    if out["type" if "type" in out else "x-kubernetes-int-or-string"] == "object" and (
        optional and not nullable and "properties" in out and not out.get("required")
    ):
        # A rule is evaluated on the default as it stands, before the defaults inside of it.
        ruled = "x-kubernetes-validations" in out
        inner = {k: v["default"] for k, v in out["properties"].items() if ruled and "default" in v}
        out.setdefault("default", inner)
    return out


def _resolved(node: Schema, defs: Schema) -> Schema:
    """``node`` without references and without a union with null; its own words win."""
    own = {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "allOf")}
    if "$ref" in node:
        return {**_resolved(defs[node["$ref"].rsplit("/", 1)[-1]], defs), **own}
    if "anyOf" in node:
        parts = [part for part in node["anyOf"] if part.get("type") != "null"]
        if "x-kubernetes-int-or-string" in node:
            return own
        if len(parts) != 1:
            raise TypeError(f"a union has no structural form: {node!r}")
        return {**_resolved(parts[0], defs), **own}
    if "const" in node:
        own["enum"] = [own.pop("const")]
    return own
