"""The Kubernetes API as plain JSON, over the official client: its configuration and transport."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from stopway_operator import objects
from stopway_operator.kinds import Kind
from stopway_operator.objects import Obj

TIMEOUT_S = 30.0
PAGE = 500
_config: Any = config  # untyped
_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


class ApiError(Exception):
    """The API server said no. ``status`` is the HTTP status, 0 when it could not be asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def in_cluster() -> bool:
    """Whether to use this pod's service account; ``KUBECONFIG`` wins."""
    return os.path.exists(_TOKEN) and "KUBECONFIG" not in os.environ


async def connect() -> client.ApiClient:
    """A client for the cluster that this pod is in, else for that of ``KUBECONFIG``."""
    configuration = client.Configuration()
    if in_cluster():
        _config.load_incluster_config(client_configuration=configuration)
    else:
        await _config.load_kube_config(client_configuration=configuration)
    configuration.connection_pool_maxsize = 32
    return client.ApiClient(configuration)


class Api:
    """Requests; counts the writes."""

    def __init__(self, api_client: client.ApiClient) -> None:
        self._client: Any = api_client  # untyped
        self.reads = 0
        self.writes = 0

    async def close(self) -> None:
        await self._client.close()

    async def request(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Obj:
        """One request. Raises ``ApiError``."""
        if method == "GET":
            self.reads += 1
        else:
            self.writes += 1
        serialized = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        timeout: Any = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            response = await self._client.call_api(*serialized, _request_timeout=timeout)
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, f"{method} {path}: {type(error).__name__}: {error}") from None
        status = int(response.status)
        answer = _parsed(text)
        if not 200 <= status < 300:
            raise ApiError(status, str(answer.get("message") or f"{method} {path}: HTTP {status}"))
        return answer

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        """One object, or None when there is none of that name."""
        try:
            return await self.request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = ""
    ) -> tuple[list[Obj], int]:
        """All objects of a kind and the version of the list."""
        found: list[Obj] = []
        version = 0
        async for page in self._pages(kind.path(namespace), selector):
            found += page.get("items") or []
            version = version or objects.version_of(page)
        return found, version

    async def _pages(self, path: str, selector: str) -> AsyncIterator[Obj]:
        query = {"limit": str(PAGE)}
        if selector:
            query["labelSelector"] = selector
        while True:
            page = await self.request("GET", path, query)
            yield page
            token = objects.meta(page).get("continue")
            if not token:
                return
            query["continue"] = str(token)


def _parsed(text: bytes) -> Obj:
    try:
        answer = json.loads(text or b"{}")
    except ValueError:
        return {"message": text[:500].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {}
