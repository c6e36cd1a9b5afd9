"""Carries out writes: one request each, and what comes back goes into the store."""

from __future__ import annotations

from stopway_operator import crd, kinds, objects
from stopway_operator.api import Api, ApiError
from stopway_operator.objects import Obj
from stopway_operator.secret_cache import SecretCache
from stopway_operator.store import Store
from stopway_operator.writes import Notice, Verb, Write

_APPLY = {"fieldManager": objects.MANAGER, "force": "true"}
_APPLY_TYPE = "application/apply-patch+yaml"
_MERGE_TYPE = "application/merge-patch+json"


class StaleError(Exception):
    """What was seen is no longer so: look again, then plan again."""


class Applier:
    """The only one who writes."""

    def __init__(self, api: Api, store: Store, secrets: SecretCache) -> None:
        self._api = api
        self._store = store
        self._secrets = secrets

    async def write(self, write: Write) -> None:
        """Do it. Raises ``StaleError``, or ``ApiError`` for what the API server does not take."""
        if write.verb is Verb.CREATE:
            await self._create(write)
        elif write.verb is Verb.APPLY:
            await self._apply(write)
        elif write.verb is Verb.PATCH:
            body = {**write.body, "metadata": {"uid": write.uid}}
            self._store.put(write.kind, await self._patch(write, body, _MERGE_TYPE))
        else:
            await self._delete(write)

    async def status(self, service: Obj, status: Obj) -> None:
        """Write the status of a service."""
        name, namespace = objects.name_of(service), objects.namespace_of(service)
        body = {
            "apiVersion": crd.API_VERSION,
            "kind": crd.KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": objects.uid_of(service)},
            "status": status,
        }
        path = kinds.SERVICE.path(namespace, name, "status")
        try:
            answer = await self._api.request("PATCH", path, _APPLY, body, _APPLY_TYPE)
        except ApiError as error:
            if error.status in (404, 409):
                raise StaleError from None
            raise
        self._store.put(kinds.SERVICE, answer)

    async def tell(self, service: Obj, notice: Notice, now: float) -> None:
        """Post an event about a service."""
        namespace, at = objects.namespace_of(service), objects.timestamp(now)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{objects.name_of(service)}-", "namespace": namespace},
            "involvedObject": {
                "apiVersion": crd.API_VERSION,
                "kind": crd.KIND,
                "name": objects.name_of(service),
                "namespace": namespace,
                "uid": objects.uid_of(service),
            },
            "reason": notice.reason,
            "message": notice.message[:1024],
            "type": "Warning" if notice.warning else "Normal",
            "source": {"component": objects.MANAGER},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        await self._api.request("POST", kinds.EVENT.path(namespace), body=body)

    async def _create(self, write: Write) -> None:
        query = {"fieldManager": objects.MANAGER}
        path = write.kind.path(write.namespace)
        try:
            made = await self._api.request("POST", path, query, write.body)
        except ApiError as error:
            if error.status != 409:
                raise
            self._secrets.forget(write.namespace, write.name)
            raise StaleError from None
        self._secrets.put(made)

    async def _apply(self, write: Write) -> None:
        body = write.body
        if write.uid:
            # Never makes anew what somebody has deleted meanwhile.
            body = {**body, "metadata": {**body["metadata"], "uid": write.uid}}
        else:
            # Never takes over what somebody else has under this name.
            known = await self._api.get(write.kind, write.namespace, write.name)
            if known is not None:
                self._store.put_named(write.kind, known, body)
                raise StaleError
        self._store.put(write.kind, await self._patch(write, body, _APPLY_TYPE))

    async def _patch(self, write: Write, body: Obj, content_type: str) -> Obj:
        path = write.kind.path(write.namespace, write.name)
        query = _APPLY if content_type == _APPLY_TYPE else {"fieldManager": objects.MANAGER}
        try:
            return await self._api.request("PATCH", path, query, body, content_type)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        await self._look_again(write)
        raise StaleError

    async def _look_again(self, write: Write) -> None:
        """What was seen is not there any more, and no watch has told so yet."""
        known = await self._api.get(write.kind, write.namespace, write.name)
        gone = {"namespace": write.namespace, "name": write.name, "uid": write.uid}
        if known is None or objects.uid_of(known) != write.uid:
            self._store.remove(write.kind, {"metadata": gone})
        if known is not None:
            self._store.put_named(write.kind, known, write.body)

    async def _delete(self, write: Write) -> None:
        body: Obj = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": write.uid},
            "propagationPolicy": "Background",
        }
        if write.force:
            # A pod that anybody has had news of since may run after all.
            body["preconditions"]["resourceVersion"] = write.version
            body["gracePeriodSeconds"] = 0
        path = write.kind.path(write.namespace, write.name)
        try:
            answer = await self._api.request("DELETE", path, body=body)
        except ApiError as error:
            if error.status == 409:
                await self._look_again(write)
                raise StaleError from None
            if error.status != 404:
                raise
            answer = {}
        if answer.get("kind") == write.kind.name and objects.deleting(answer) and not write.force:
            self._store.put(write.kind, answer)
            return
        gone = {"namespace": write.namespace, "name": write.name, "uid": write.uid}
        self._store.remove(write.kind, {"metadata": gone})
