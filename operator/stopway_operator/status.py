"""The status of a service, from what is seen and from the status before; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stopway_operator import crd, kinds, objects
from stopway_operator.diagnose import Problem, pod_problem
from stopway_operator.lifecycle import Facts, Phase, phase
from stopway_operator.objects import Obj
from stopway_operator.observed import Observed, pod_ready, set_revision
from stopway_operator.render import engine, gateway
from stopway_operator.render.context import Context
from stopway_operator.writes import Notice


@dataclass(frozen=True)
class Seen:
    """What a plan has found out on its way."""

    context: Context
    observed: Observed
    revision: str
    facts: Sequence[Facts]
    problems: Sequence[Problem]
    now: float
    pending: bool  # something is still to be written
    wanted: list[Facts] = field(init=False)

    def __post_init__(self) -> None:
        count = self.context.spec.replicas
        object.__setattr__(self, "wanted", [f for f in self.facts if f.index < count])

    @property
    def previous(self) -> Obj:
        return self.observed.service.get("status") or {}

    @property
    def ready(self) -> int:
        return sum(1 for f in self.wanted if f.ready)

    @property
    def updated(self) -> int:
        return sum(1 for f in self.wanted if f.exists and f.current)

    @property
    def gateway_ready(self) -> bool:
        """A gateway is up and, as far as anybody knows, has found a group."""
        pods = [p for p in self.observed.of_component(objects.GATEWAY) if pod_ready(p)]
        known: list[Sequence[str] | None] = [
            self.observed.gateways.get(objects.uid_of(pod)) for pod in pods
        ]
        return None in known or any(bool(groups) for groups in known)

    @property
    def gateway_settled(self) -> bool:
        """Its Deployment has rolled out."""
        found = self.observed.find(kinds.DEPLOYMENT, self.context.gateway)
        if found is None:
            return False
        status, generation = found.get("status") or {}, objects.meta(found).get("generation", 0)
        wanted = found["spec"].get("replicas", 1)
        return bool(
            status.get("observedGeneration", 0) >= generation
            and status.get("updatedReplicas", 0) >= wanted
            and status.get("availableReplicas", 0) >= wanted
            and status.get("replicas", 0) <= wanted
        )

    @property
    def _gateways_wanted(self) -> bool:
        found = self.observed.find(kinds.DEPLOYMENT, self.context.gateway)
        return found is None or found["spec"].get("replicas", 1) > 0

    @property
    def settled(self) -> bool:
        """Everything is as the spec wants it."""
        return (
            not self.pending
            and len(self.facts) == len(self.wanted)
            and all(f.ready and f.current for f in self.wanted)
            and self.gateway_settled
            and (self.gateway_ready or not self.wanted or not self._gateways_wanted)
        )


def status_of(seen: Seen) -> Obj:
    """The whole status."""
    context, previous = seen.context, seen.previous
    exist = [f for f in seen.facts if f.exists]
    fields: Obj = {
        "observedGeneration": _generation(seen.observed),
        "replicas": len(exist),
        "readyReplicas": seen.ready,
        "updatedReplicas": seen.updated,
        "summary": f"{seen.ready}/{context.spec.replicas}",
        "selector": engine.scale_selector(context),
        "revision": seen.revision,
        "model": context.model_name,
        "url": gateway.url(context),
        "apiKeysSecret": context.api_keys()[0],
        "groups": [_group(seen, facts) for facts in seen.facts],
    }
    last_progress = _last_progress(seen, fields)
    fields["lastProgressTime"] = last_progress
    fields["conditions"] = _conditions(seen, last_progress)
    status = crd.InferenceServiceStatus.model_validate({**previous, **fields})
    return status.model_dump(by_alias=True, exclude_none=True)


def invalid(observed: Observed, message: str, now: float) -> Obj:
    """The status of a service whose spec can't work; what runs goes on running."""
    previous = observed.service.get("status") or {}
    stated = {
        "Ready": ("False", "InvalidSpec", message),
        "Progressing": ("False", "InvalidSpec", "nothing is changed until the spec is corrected"),
        "Degraded": ("True", "InvalidSpec", message),
    }
    fields = {
        "observedGeneration": _generation(observed),
        "conditions": _stamped(observed, previous, stated, now),
    }
    status = crd.InferenceServiceStatus.model_validate({**previous, **fields})
    return status.model_dump(by_alias=True, exclude_none=True)


def deadline(seen: Seen) -> float:
    """When a change that does not come forward is said to have failed."""
    since = objects.seconds(seen.previous.get("lastProgressTime")) or seen.now
    return since + seen.context.spec.rollout.progress_deadline_seconds


def transitions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Notice]:
    """Events for conditions whose reason has changed."""
    old = {c["type"]: c for c in before.get("conditions") or ()}
    notices = []
    for condition in after["conditions"]:
        kind, reason, text = condition["type"], condition["reason"], condition["message"]
        if old.get(kind, {}).get("reason") == reason:
            continue
        held = condition["status"] == "True"
        if kind == "Degraded" and held:
            notices.append(Notice(reason, text, warning=True))
        elif kind == "Ready" and (held or old.get(kind, {}).get("status") == "True"):
            notices.append(Notice(reason, text, warning=not held))
    return notices


def _generation(observed: Observed) -> int:
    return int(objects.meta(observed.service).get("generation", 0))


def _group(seen: Seen, facts: Facts) -> Obj:
    name = engine.group_name(seen.context, facts.index)
    pods = seen.observed.of_group(name)
    found = seen.observed.find(kinds.STATEFUL_SET, name)
    problems = [p for pod in pods if (p := pod_problem(pod, seen.now)) is not None]
    known = {group["name"]: group for group in seen.previous.get("groups") or ()}
    epoch = known.get(name, {}).get("epoch")
    if pods:
        epoch = seen.observed.epochs.get(objects.uid_of(pods[0]), epoch) or epoch
    return {
        "name": name,
        "ready": facts.ready,
        "phase": phase(facts).value,
        "epoch": epoch,
        "revision": "" if found is None or facts.blocked else set_revision(found),
        "nodes": [str((pod.get("spec") or {}).get("nodeName", "")) for pod in pods],
        "message": problems[0].message if problems else "",
    }


def _last_progress(seen: Seen, fields: Obj) -> str:
    names = ("revision", "replicas", "readyReplicas", "updatedReplicas", "summary")
    moved = any(seen.previous.get(name) != fields[name] for name in names)
    moved |= seen.previous.get("observedGeneration") != fields["observedGeneration"]
    last = seen.previous.get("lastProgressTime")
    return objects.timestamp(seen.now) if moved or not last else str(last)


def _conditions(seen: Seen, last_progress: str) -> list[Obj]:
    late = (
        not seen.settled
        and seen.now
        >= objects.seconds(last_progress) + seen.context.spec.rollout.progress_deadline_seconds
    )
    stated = {
        "Ready": _ready(seen),
        "Progressing": _progressing(seen, late),
        "Degraded": _degraded(seen, late),
    }
    return _stamped(seen.observed, seen.previous, stated, seen.now)


def _stamped(
    observed: Observed, previous: Obj, stated: Mapping[str, tuple[str, str, str]], now: float
) -> list[Obj]:
    known = {c["type"]: c for c in previous.get("conditions") or ()}
    found = []
    for kind, (status, reason, message) in stated.items():
        old = known.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        found.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": since or objects.timestamp(now),
                "observedGeneration": _generation(observed),
            }
        )
    return found


def _ready(seen: Seen) -> tuple[str, str, str]:
    spec = seen.context.spec
    if not spec.replicas:
        return "False", "ScaledToZero", "replicas is 0: raise it to serve"
    enough = max(1, spec.replicas - spec.rollout.max_unavailable)
    if seen.ready < enough:
        return "False", "TooFewGroups", f"{seen.ready} of {spec.replicas} groups are ready"
    if not seen.gateway_ready:
        return "False", "GatewayNotReady", "no gateway is up that has found a group"
    return "True", "Serving", f"serving at {gateway.url(seen.context)}"


def _progressing(seen: Seen, late: bool) -> tuple[str, str, str]:
    spec = seen.context.spec
    if seen.settled:
        return "False", "Settled", "everything is as the spec wants it"
    if late:
        text = f"no progress for {spec.rollout.progress_deadline_seconds} s"
        return "False", "ProgressDeadlineExceeded", f"{text}; see Degraded and the groups' messages"
    if any(f.exists and not f.current for f in seen.wanted):
        done = f"{seen.updated} of {spec.replicas} groups have revision {seen.revision}"
        return "True", "RollingOut", done
    if len(seen.facts) > len(seen.wanted):
        return "True", "ScalingDown", f"{len(seen.facts) - len(seen.wanted)} groups drain"
    if any(phase(f) is Phase.RELEASED for f in seen.wanted):
        return "True", "WaitingForRoom", "a group was released and will be tried again"
    if seen.ready < spec.replicas:
        return "True", "Forming", f"{seen.ready} of {spec.replicas} groups are ready"
    return "True", "GatewayRollingOut", "the gateway is being changed, or looks for the groups"


def _degraded(seen: Seen, late: bool) -> tuple[str, str, str]:
    if seen.problems:
        first = seen.problems[0]
        more = f" (and {len(seen.problems) - 1} more)" if len(seen.problems) > 1 else ""
        return "True", first.reason, f"{first.message}{more}"
    if late:
        return "True", "ProgressDeadlineExceeded", "a change does not come forward: see the groups"
    return "False", "AsExpected", ""
