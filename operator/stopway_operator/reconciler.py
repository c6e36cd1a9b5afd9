"""The one loop: look, plan, write. Level-based and keyed by UID; it remembers nothing it needs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from stopway_operator import kinds, objects
from stopway_operator.api import Api, ApiError
from stopway_operator.apply import Applier, StaleError
from stopway_operator.config import OperatorConfig
from stopway_operator.objects import Obj
from stopway_operator.observed import Observed
from stopway_operator.plan import Plan, context_of, plan
from stopway_operator.prober import Prober
from stopway_operator.render.context import SpecError
from stopway_operator.render.secrets import TOKENS
from stopway_operator.secret_cache import SecretCache
from stopway_operator.store import Store
from stopway_operator.workqueue import WorkQueue
from stopway_operator.writes import Notice

_LOG = logging.getLogger(__name__)
COALESCE_S = 0.1
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 60.0
TOLD_MAX = 5000
TOLD_S = 300.0
REFUSALS = (400, 403, 422, 500)  # 500: a server-side apply of what does not fit a schema
MANAGED = f"{objects.LABEL_MANAGED}={objects.MANAGER}"


class Reconciler:
    """Runs ``workers`` at once, on different services."""

    def __init__(self, api: Api, config: OperatorConfig, namespaces: list[str] | None) -> None:
        self._api = api
        self._config = config
        self._namespaces: list[str | None] = [None] if namespaces is None else [*namespaces]
        self.queue = WorkQueue(time.monotonic)
        self.store = Store(lambda uid: self.queue.add(uid, COALESCE_S))
        self._secrets = SecretCache(api, config.resync_s)
        self._applier = Applier(api, self.store, self._secrets)
        self._prober = Prober()
        self._failures: dict[str, int] = {}
        self._told: dict[tuple[str, str, str], float] = {}
        self.reconciles = 0
        self.errors = 0
        self.listed_at = 0.0  # monotonic

    async def close(self) -> None:
        await self._prober.close()

    # --- relists -------------------------------------------------------------------------

    async def relist(self) -> None:
        """Bring the store up to what the API server has. Raises ``ApiError``."""
        for kind in kinds.WATCHED:
            await self._relist(kind)
        self.listed_at = time.monotonic()

    async def _relist(self, kind: kinds.Kind) -> None:
        selector = "" if kind in (kinds.SERVICE, kinds.NODE) else MANAGED
        listed: list[Obj] = []
        versions = []
        try:
            for namespace in self._namespaces if kind.namespaced else [None]:
                found, version = await self._api.list(kind, namespace, selector)
                listed += found
                versions.append(version)
        except ApiError as error:
            if kind is not kinds.NODE or error.status != 403:
                raise
            return  # a Role sees no nodes: lost ones are then known by pods that do not go
        if kind is kinds.NODE:
            self.store.nodes_visible = True
        self.store.relist(kind, listed, min(versions), time.monotonic())

    async def resync(self) -> None:
        """Relist and look at every service now and then, for ever."""
        while True:
            await asyncio.sleep(self._config.resync_s)
            try:
                await self.relist()
            except ApiError as error:
                _LOG.warning("the relist failed: %s", error)
                continue
            for service in self.store.services():
                self.queue.add(objects.uid_of(service))

    # --- reconciles ----------------------------------------------------------------------

    async def run(self) -> None:
        """Work, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.resync())
            for _ in range(self._config.workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            uid = await self.queue.take()
            try:
                delay = await self.reconcile(uid)
            except StaleError:
                delay = COALESCE_S
            except Exception as error:  # one service must not stop the others
                self.errors += 1
                delay = self._backoff(uid)
                level = logging.WARNING if isinstance(error, ApiError) else logging.ERROR
                _LOG.log(level, "service %s, again in %.1f s: %r", uid, delay, error)
            finally:
                self.queue.done(uid)
            if delay is not None:
                self.queue.add(uid, delay)

    def _backoff(self, uid: str) -> float:
        failures = self._failures[uid] = self._failures.get(uid, 0) + 1
        return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(10, failures - 1))

    async def reconcile(self, uid: str) -> float | None:
        """One look at one service; in how many seconds to look again. Raises on failure."""
        observed = await self._observe(uid)
        if observed is None:
            self._failures.pop(uid, None)
            return None
        service, now = observed.service, time.time()
        tokens = [secrets.token_urlsafe(24) for _ in range(TOKENS)]
        planned = plan(observed, self._config, now, tokens)
        refused = await self._write(planned)
        if refused:
            planned = plan(replace(observed, refused=refused), self._config, now, tokens)
        if planned.status is not None:
            await self._applier.status(service, planned.status)
        told = [n for n in planned.notices if n.warning] if refused else planned.notices
        await self._tell(service, told, now)
        if refused:
            return self._backoff(uid)
        self._failures.pop(uid, None)
        return planned.requeue_s

    def _seen(self, uid: str) -> Observed | None:
        """What the store has of a service, None when it is gone or going."""
        service = self.store.service(uid)
        if service is None or objects.deleting(service):
            return None
        return self.store.observe(service)

    async def _observe(self, uid: str) -> Observed | None:
        """Everything that is seen of a service. Raises ``StaleError``, and ``ApiError``.

        What must be waited for comes first and the store last, because a plan is carried out at
        once and some of it can't be taken back: it must not be for the spec of a second ago.
        """
        before, now = self._seen(uid), time.time()
        if before is None:
            return None
        self.reconciles += 1
        names = _secret_names(before, self._config)
        known = await self._secrets.read(objects.namespace_of(before.service), names, now)
        epochs = await self._prober.epochs(before.pods, now)
        gateways = await self._prober.gateways(before.pods, now)
        observed = self._seen(uid)
        if observed is None:
            return None
        if _secret_names(observed, self._config) != names:
            raise StaleError  # by now it needs others than those that were read
        return replace(observed, secrets=known, epochs=epochs, gateways=gateways)

    async def _write(self, planned: Plan) -> list[str]:
        """Write in order; what the API server does not take is told and left out."""
        refused = []
        for write in planned.writes:
            try:
                await self._applier.write(write)
                _LOG.info("%s in %s", write, write.namespace)
            except ApiError as error:
                if error.status not in REFUSALS:
                    raise
                refused.append(f"{write}: {error}"[:600])
        return refused

    async def _tell(self, service: Obj, notices: Sequence[Notice], now: float) -> None:
        for notice in notices:
            if self._told_lately(objects.uid_of(service), notice, now):
                continue
            try:
                await self._applier.tell(service, notice, now)
            except ApiError as error:
                _LOG.warning("an event was not posted: %s", error)

    def _told_lately(self, uid: str, notice: Notice, now: float) -> bool:
        """Whether the same was told lately: a flapping state must not fill the events."""
        key = (uid, notice.reason, notice.message)
        if now - self._told.get(key, 0.0) < TOLD_S:
            return True
        self._told[key] = now
        if len(self._told) > TOLD_MAX:
            self._told.pop(next(iter(self._told)))
        return False


def _secret_names(observed: Observed, config: OperatorConfig) -> list[str]:
    try:
        context = context_of(observed, config)
    except SpecError:
        return []
    names = [context.service_secret, context.api_keys()[0], context.redis_url(objects.ENGINE)[0]]
    return list(dict.fromkeys(names))
