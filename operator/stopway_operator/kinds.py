"""The kinds that the operator touches, and how their addresses look."""

from __future__ import annotations

from dataclasses import dataclass

from stopway_operator import crd


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of the Kubernetes API."""

    name: str
    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group, empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The URL path of a collection (no ``name``) or of an object."""
        prefix = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{prefix}{scope}/{self.plural}{tail}"


SERVICE = Kind(crd.KIND, crd.API_VERSION, crd.PLURAL)
POD = Kind("Pod", "v1", "pods")
NODE = Kind("Node", "v1", "nodes", namespaced=False)
EVENT = Kind("Event", "v1", "events")
SECRET = Kind("Secret", "v1", "secrets")
K8S_SERVICE = Kind("Service", "v1", "services")
STATEFUL_SET = Kind("StatefulSet", "apps/v1", "statefulsets")
DEPLOYMENT = Kind("Deployment", "apps/v1", "deployments")
PDB = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")

APPLIED = (K8S_SERVICE, STATEFUL_SET, DEPLOYMENT, PDB, NETWORK_POLICY)
"""Owned by a service and watched; Secrets are owned too, but only ever read by name."""

WATCHED = (SERVICE, *APPLIED, POD, NODE)
BY_NAME = {kind.name: kind for kind in (*WATCHED, SECRET, EVENT)}
