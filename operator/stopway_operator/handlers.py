"""kopf's part: it watches, and tells the store. No finalizers, no timers, no daemons."""

from __future__ import annotations

from typing import Any

import kopf

from stopway_operator import kinds
from stopway_operator.api import in_cluster
from stopway_operator.kinds import Kind
from stopway_operator.reconciler import MANAGED
from stopway_operator.store import Store


def registry_of(store: Store) -> kopf.OperatorRegistry:
    """One event handler for each watched kind; for nodes only where they may be seen."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry, id="login", errors=kopf.ErrorsMode.TEMPORARY)(_login)
    for kind in kinds.WATCHED:
        if kind is kinds.NODE and not store.nodes_visible:
            continue
        handler = kopf.on.event(
            group=kind.group,
            version=kind.version,
            plural=kind.plural,
            registry=registry,
            id=f"watch-{kind.plural}",
        )
        handler(_to_store(kind, store))
    return registry


def settings() -> kopf.OperatorSettings:
    """Watches that notice a dead connection, and nothing that writes."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True  # no need to watch namespaces and CRDs
    found.peering.standalone = True  # two of us do no harm: each write says what it has seen
    found.watching.server_timeout = 300
    found.watching.client_timeout = 330
    found.watching.connect_timeout = 10
    found.networking.request_timeout = 30
    found.networking.connect_timeout = 10
    found.networking.error_backoffs = (1, 1, 2, 3, *(5,) * 1000)  # an outage is waited out
    found.queueing.idle_timeout = 1.0
    for kind in (*kinds.APPLIED, kinds.POD):
        found.watching.label_selectors[kind.group, kind.version, kind.plural] = MANAGED
    return found


def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    login = kopf.login_with_service_account if in_cluster() else kopf.login_with_kubeconfig
    return login(**kwargs)


def _to_store(kind: Kind, store: Store) -> Any:
    async def handler(event: Any, **_: Any) -> None:
        obj = dict(event["object"])
        if event["type"] == "DELETED":
            store.remove(kind, obj)
        else:
            store.put(kind, obj, watched=True)

    return handler
