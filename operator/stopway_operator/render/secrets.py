"""Secrets: made once, from entropy that comes from outside, and never rewritten."""

from __future__ import annotations

from collections.abc import Sequence

from stopway_operator import kinds, objects
from stopway_operator.objects import Obj
from stopway_operator.render.context import Context
from stopway_operator.render.redis import redis_url, users

TOKENS = 4  # how many random texts are needed at most


def wanted(context: Context, tokens: Sequence[str]) -> list[Obj]:
    """The Secrets of this service, as they are made when they are missing."""
    secret, keys, gateway, engine = tokens[:TOKENS]
    found = [_secret(context, context.service_secret, objects.ENGINE, {"secret": secret})]
    if context.spec.gateway.api_keys_secret_ref is None:
        name, key = context.api_keys()
        value = f"sk-stopway-{keys}"
        data = {key: f"default:admin={value}", "key": value}  # for the gateway, and for people
        found.append(_secret(context, name, objects.GATEWAY, data))
    if context.redis_managed:
        data = {
            "gateway-url": redis_url(context, "gateway", gateway),
            "engine-url": redis_url(context, "engine", engine),
            "users.acl": users(context.uid, gateway, engine),
        }
        found.append(_secret(context, context.redis, objects.REDIS, data))
    return found


def _secret(context: Context, name: str, component: str, data: dict[str, str]) -> Obj:
    return context.object(kinds.SECRET, name, component, type="Opaque", stringData=data)
