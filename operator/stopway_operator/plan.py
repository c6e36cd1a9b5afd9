"""The next writes of one service: pure, no clock, no I/O, nothing remembered.

``plan`` is called with everything that is seen and says what to write now, in order, and what the
status is. It is called again whenever something changes or ``requeue_s`` has passed, and asks for
nothing once all is as it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from stopway_operator import crd, diff, kinds, lifecycle, objects, status, writes
from stopway_operator.config import OperatorConfig
from stopway_operator.diagnose import Problem, lost_pods, pod_problem
from stopway_operator.lifecycle import UNLISTED_MAX_S, Facts, Limits, Step
from stopway_operator.objects import Obj
from stopway_operator.observed import Observed, all_facts, unscheduled_since
from stopway_operator.render import engine, gateway, redis, secrets
from stopway_operator.render.context import Context, SpecError
from stopway_operator.writes import Notice, Write

EPOCH_RETRY_S = 10.0  # a leader that is ready did not answer; no event tells when it does
POLL_S = 2.0  # while something is on its way, for what no event tells (epochs)


@dataclass(frozen=True)
class Plan:
    """What to do now. ``status`` is None when it is as it was."""

    writes: Sequence[Write] = ()
    status: Obj | None = None
    notices: Sequence[Notice] = ()
    requeue_s: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is to be written."""
        return not self.writes and self.status is None


def plan(observed: Observed, config: OperatorConfig, now: float, tokens: Sequence[str]) -> Plan:
    """The next writes. ``tokens`` are fresh random texts, used for Secrets that are missing."""
    if objects.deleting(observed.service):
        return Plan()  # the owner references do the rest
    try:
        context = context_of(observed, config)
        return _plan(context, observed, now, tokens)
    except SpecError as error:
        after = status.invalid(observed, str(error), now)
        before = observed.service.get("status") or {}
        return Plan(
            status=None if same_status(before, after) else after,
            notices=status.transitions(before, after),
        )


def context_of(observed: Observed, config: OperatorConfig) -> Context:
    """The service as the renderers see it. Raises ``SpecError``."""
    service = observed.service
    try:
        spec = crd.InferenceServiceSpec.model_validate(service.get("spec") or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"spec.{where}: {first['msg']}") from None
    context = Context(
        objects.name_of(service), objects.namespace_of(service), observed.uid, spec, config
    )
    if spec.gateway.api_keys_secret_ref is None:
        return context
    given = observed.secrets.get(context.api_keys()[0])
    version = str(objects.meta(given).get("resourceVersion", "")) if given else ""
    return Context(context.name, context.namespace, context.uid, spec, config, keys_version=version)


def same_status(before: Obj, after: Obj) -> bool:
    """Whether writing ``after`` would change nothing."""
    read = crd.InferenceServiceStatus.model_validate
    return bool(before) and read(before) == read(after)


def _plan(context: Context, observed: Observed, now: float, tokens: Sequence[str]) -> Plan:
    spec = context.spec
    revision = engine.revision(context)
    facts = all_facts(context, observed, revision)
    limits = Limits(
        spec.replicas, spec.rollout.max_unavailable, spec.recovery.incomplete_group_seconds
    )
    steps = lifecycle.decide(facts, limits, now)
    todo: list[Write] = []
    notices: list[Notice] = []
    problems = [Problem("WriteRefused", text) for text in observed.refused]
    lost = lost_pods(observed.pods, observed.nodes, spec.recovery.lost_node_seconds)
    for pod, at in lost:
        node = pod["spec"]["nodeName"]
        if now >= at:
            todo.append(writes.delete(kinds.POD, pod, force=True))
            text = f"pod {objects.name_of(pod)} is deleted by force: its node {node} is lost"
            notices.append(Notice("NodeLost", text, warning=True))
        else:
            text = f"node {node} does not answer; pod {objects.name_of(pod)} is replaced soon"
            problems.append(Problem("NodeLost", text))
    todo += _secrets(context, observed, tokens, problems)
    todo += _applied(_static(context), observed, problems)
    for group in facts:
        if group.blocked:
            name = engine.group_name(context, group.index)
            _taken(observed.objects["StatefulSet", name], kinds.STATEFUL_SET, observed, problems)
        todo += _group(context, observed, group, steps.get(group.index), revision, now)
        notices += _told(context, group, steps.get(group.index), revision)
    notices += _overlooked(context, facts, steps, now)
    todo += _applied(gateway.gateway_objects(context), observed, problems)
    if not context.redis_managed and all(f.current for f in facts):
        todo += _unused_redis(context, observed)
    problems += [p for pod in observed.pods if (p := pod_problem(pod, now)) is not None]
    seen = status.Seen(context, observed, revision, facts, problems, now, bool(todo))
    before, after = seen.previous, status.status_of(seen)
    times = [at for _, at in lost]
    times.append(lifecycle.next_time(facts, limits, now) or 0.0)
    if any(unscheduled_since(pod) is not None for pod in observed.pods):
        times.append(now + 10.0)
    if any(g["ready"] and not g.get("epoch") for g in after.get("groups") or ()):
        times.append(now + EPOCH_RETRY_S)
    if not seen.settled:
        times += [now + POLL_S, status.deadline(seen)]
    return Plan(
        writes=todo,
        status=None if same_status(before, after) else after,
        notices=[*notices, *status.transitions(before, after)],
        requeue_s=min((at - now for at in times if at > now), default=None),
    )


def _static(context: Context) -> list[Obj]:
    """What does not depend on where a group is."""
    found = redis.redis_objects(context) if context.redis_managed else []
    found += engine.shared_objects(context)
    for group in context.groups:
        found += engine.group_objects(context, group)
    return found


def _applied(wanted: Iterable[Obj], observed: Observed, problems: list[Problem]) -> list[Write]:
    """Writes for those that are not as they should be; names that others use are left alone."""
    found = []
    for obj in wanted:
        kind = kinds.BY_NAME[obj["kind"]]
        known = observed.find(kind, objects.name_of(obj))
        if known is not None and (observed.foreign(known) or objects.deleting(known)):
            _taken(known, kind, observed, problems)
            continue
        marked = diff.stamped(obj)
        if diff.must_apply(known, marked):
            found.append(writes.apply(kind, marked, known))
    return found


def _taken(known: Obj, kind: kinds.Kind, observed: Observed, problems: list[Problem]) -> None:
    """A name in use: by an object that goes by itself, or by somebody who must be asked."""
    owner = objects.controller_of(known)
    going = objects.deleting(known) or (
        owner.get("kind") == crd.KIND and owner.get("name") == objects.name_of(observed.service)
    )
    if not going:
        problems.append(
            Problem(
                "NameTaken",
                f"{kind.name} {objects.name_of(known)} belongs to somebody else: delete it, or "
                "give this InferenceService another name",
            )
        )


def _secrets(
    context: Context, observed: Observed, tokens: Sequence[str], problems: list[Problem]
) -> list[Write]:
    found = []
    for secret in secrets.wanted(context, tokens):
        known = observed.secrets.get(objects.name_of(secret))
        if known is None:
            found.append(writes.create(kinds.SECRET, secret))
        elif observed.foreign(known):
            _taken(known, kinds.SECRET, observed, problems)
    given = []
    if context.spec.gateway.api_keys_secret_ref is not None:
        given.append(context.api_keys())
    if not context.redis_managed:
        given.append(context.redis_url(objects.ENGINE))
    for name, key in given:
        known = observed.secrets.get(name)
        if known is None or key not in known.get("keys", ()):
            what = f"Secret {name}" if known is None else f"key {key} of Secret {name}"
            problems.append(Problem("SecretMissing", f"{what} does not exist: create it"))
    return found


def _group(
    context: Context, observed: Observed, facts: Facts, step: Step | None, revision: str, now: float
) -> list[Write]:
    name = engine.group_name(context, facts.index)
    found = observed.find(kinds.STATEFUL_SET, name)
    if step is Step.REMOVE:
        return [
            writes.delete(kind, known)
            for kind in (kinds.STATEFUL_SET, kinds.NETWORK_POLICY, kinds.K8S_SERVICE)
            if (known := observed.find(kind, name)) is not None
            and not observed.foreign(known)
            and not objects.deleting(known)
        ]
    if step is Step.DRAIN:
        assert found is not None
        return [writes.patch(kinds.STATEFUL_SET, found, {"spec": {"replicas": 0}})]
    group = engine.plan_of(context, name)
    if group is None or facts.blocked:
        return []
    if step is None:
        if not (facts.exists and facts.current and facts.replicas == facts.size):
            return []
        kept = {} if facts.ready else _releases(facts.releases)
        wanted = diff.stamped(engine.stateful_set(context, group, facts.size, kept, revision))
        if not diff.must_apply(found, wanted):
            return []
        return [writes.apply(kinds.STATEFUL_SET, wanted, found)]
    replicas = facts.size if step is Step.START else 0
    notes = _releases(facts.releases) if step is Step.START else {}
    if step is Step.RELEASE:
        notes = {
            objects.ANNOTATION_RELEASED_AT: objects.timestamp(now),
            **_releases(facts.releases + 1),
        }
    wanted = diff.stamped(engine.stateful_set(context, group, replicas, notes, revision))
    return [writes.apply(kinds.STATEFUL_SET, wanted, found)]


def _releases(count: int) -> dict[str, str]:
    return {objects.ANNOTATION_RELEASES: str(count)} if count else {}


def _told(context: Context, facts: Facts, step: Step | None, revision: str) -> list[Notice]:
    name = engine.group_name(context, facts.index)
    if step is Step.STOP:
        return [Notice("GroupReplaced", f"group {name} drains, then starts as {revision}")]
    if step is Step.DRAIN:
        return [Notice("GroupDrains", f"group {name} is no longer wanted: it drains and goes")]
    if step is Step.RELEASE:
        text = (
            f"group {name} is released: some of its pods found no node, while the others held "
            "theirs; it is tried again later. Add nodes or lower replicas"
        )
        return [Notice("GroupReleased", text, warning=True)]
    return []


def _overlooked(
    context: Context, facts: Sequence[Facts], steps: Mapping[int, Step], now: float
) -> list[Notice]:
    """A rollout that has waited for a gateway in vain says so when it goes on."""
    if Step.STOP not in steps.values():
        return []
    text = (
        "a gateway does not send to group {name}, which has been ready for {seconds:.0f} s; the "
        "rollout goes on. Does a NetworkPolicy or DNS keep the gateway away?"
    )
    names = [engine.group_name(context, group.index) for group in facts if group.overlooked(now)]
    return [
        Notice("GatewayBehind", text.format(name=name, seconds=UNLISTED_MAX_S), warning=True)
        for name in names
    ]


def _unused_redis(context: Context, observed: Observed) -> list[Write]:
    """What is left of a Redis of ours once every group uses another."""
    return [
        writes.delete(kind, known)
        for kind in (kinds.DEPLOYMENT, kinds.NETWORK_POLICY, kinds.K8S_SERVICE)
        if (known := observed.find(kind, context.redis)) is not None
        and not observed.foreign(known)
        and not objects.deleting(known)
    ]
