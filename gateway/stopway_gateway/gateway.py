"""The gateway itself: its parts, put together, started and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from stopway_core.types import Reason
from stopway_gateway import detection, limits, trace
from stopway_gateway.auth import KeyRing, Principal
from stopway_gateway.config import Settings
from stopway_gateway.dispatch import Dispatcher
from stopway_gateway.errors import ApiError, Scope
from stopway_gateway.generation import Generation
from stopway_gateway.metrics import Metrics
from stopway_gateway.modes import ModeService
from stopway_gateway.registry import Registry
from stopway_gateway.request import Request
from stopway_gateway.requests_table import RequestsTable
from stopway_gateway.schemas import invalid
from stopway_gateway.session import LeaderSession, Listener
from stopway_gateway.stop_service import StopService
from stopway_gateway.words import AdminWords
from stopway_telemetry import Exporter

_LOG = logging.getLogger(__name__)
_DRAIN_END_S = 2.0
_DRAIN_STOPS_S = 2.0  # before a group's own deadline, so that each end has a receipt


class Gateway:
    """Everything that the routes share. ``start`` and ``close`` once each."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = KeyRing(settings.api_keys.get_secret_value())
        self.metrics = Metrics()
        self.exporter = Exporter(
            "stopway-gateway",
            {"service.instance.id": settings.gateway_id, "service.namespace": settings.service_uid},
            settings.otlp_endpoint or None,
            settings.spans_dir or None,
        )
        self.table = RequestsTable(settings.gateway_id, settings.keep_s, settings.keep_max)
        self.registry = Registry(settings, self._make_session)
        self.dispatcher = Dispatcher(settings, self.registry)
        self.modes = ModeService(self.registry)
        self.words = AdminWords()
        self.stops = StopService(settings, self.table, self.registry, self.metrics, self.exporter)
        self.draining = False
        self._active = 0  # handlers of generating routes
        self._idle = asyncio.Event()
        self._idle.set()
        self.metrics.watch(
            self.registry.loads, lambda: len(self.table), lambda: self.exporter.dropped
        )

    async def start(self) -> None:
        """Reach for the leaders and for Redis; neither has to be there yet."""
        if not len(self.keys):
            _LOG.warning("STOPWAY_API_KEYS is empty: every request will be refused")
        if not self.settings.secret.get_secret_value():
            _LOG.warning("STOPWAY_SECRET is empty: leaders will refuse this gateway")
        self.stops.start()
        await self.registry.start()

    async def close(self) -> None:
        """End all parts; breaking the leases stops whatever still runs."""
        await self.registry.close()
        await self.stops.close()
        await asyncio.to_thread(self.exporter.shutdown, self.settings.flush_s)

    async def drain(self) -> None:
        """Take nothing new, let what runs finish for ``drain_s``, then stop it: ``drain``."""
        self.draining = True
        await self._wait_idle(self.settings.drain_s)
        for request in self.table.live():
            if request.cut is None:
                self.stops.issue_for(request, Reason.DRAIN)
        await self._wait_idle(self.settings.cut_wait_s + _DRAIN_END_S)

    async def _wait_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    @property
    def active(self) -> int:
        """Clients of generating routes that are being served."""
        return self._active

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While one client of a generating route is served. Raises a 503 or a 429."""
        self.check_draining()
        if self._active >= self.settings.requests_max:
            raise ApiError(
                429,
                "Too many requests at once; try again soon.",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    # --- requests -----------------------------------------------------------------------------

    def check_draining(self) -> None:
        """Raises a 503 while draining: nothing new is taken."""
        if self.draining:
            raise ApiError(
                503, "The server is shutting down.", code="drain", headers={"retry-after": "1"}
            )

    def check_wait(self, timeout_s: float) -> None:
        """Raises a 400 for a client that wants to wait for too long."""
        most = self.settings.wait_s_max
        if timeout_s > most:
            raise invalid("timeout", f"a number of seconds from 0 to {most:g}")

    def open(self, generation: Generation, principal: Principal, scope: Scope) -> Request:
        """A new request, known and stoppable from here on. Raises a 400 or a 404."""
        if generation.model != self.settings.model_name:
            raise ApiError(
                404,
                f"The model {generation.model[:100]!r} does not exist; there is "
                f"{self.settings.model_name!r}.",
                code="model_not_found",
                param="model",
            )
        if generation.priority < 0 and not principal.admin:
            raise invalid("priority", "below 0 is for admins; this key may ask for 0 to 100")
        headers = dict(scope["headers"])
        client_id = limits.client_request_id(headers.get(b"x-request-id"))
        traceparent = headers.get(b"traceparent", b"")[:64].decode("latin-1")
        request = Request(
            self.table.new_uid(),
            principal.tenant,
            generation,
            trace.begin(traceparent, self.settings.trust_traceparent),
            client_id,
            self.settings.slow_reader_bytes_max,
        )
        request.on_settled = self._settled
        self.table.add(request)
        return request

    def _group_drains(self, session: LeaderSession, seconds: float) -> None:
        """What still runs there when its time is nearly over is stopped, with a receipt."""
        in_s = max(seconds / 2, seconds - _DRAIN_STOPS_S)
        loop = asyncio.get_running_loop()
        loop.call_later(in_s, self._stop_all_on, session, session.hello)

    def _stop_all_on(self, session: LeaderSession, hello: dict[str, Any]) -> None:
        if not session.draining or session.hello is not hello:
            return  # it came back, and what drains now has time of its own
        for request in list(session.live.values()):
            if request.outcome is None and request.cut is None:
                self.stops.issue_for(request, Reason.DRAIN)

    def client_left(self, request: Request) -> None:
        """Nobody waits for it any more: stop it, as soon as its group's policy has that noticed."""
        request.leave()
        if request.outcome is not None:
            return
        delay_s = detection.delay_s(
            request.policy,
            stream=request.generation.stream,
            waited_s=time.monotonic() - request.came,
        )
        if delay_s and request.cut is None:
            asyncio.get_running_loop().call_later(delay_s, self._stop_left, request)
        else:
            self._stop_left(request)

    def let_go(self, request: Request) -> None:
        """Its client does not read: stop it at once, for it is we who noticed, in our own way."""
        request.leave()
        self._stop_left(request)

    def _stop_left(self, request: Request) -> None:
        """Stop it, unless it is over or its leader is told already.

        One that was cut by a selector, or by another gateway's stop, is over by now in nearly all
        cases; if not, its leader may never have seen the two together.
        """
        if request.outcome is None and not request.leader_told:
            self.stops.issue_for(request, request.cut or Reason.CLIENT_DISCONNECT)

    def _settled(self, request: Request) -> None:
        self.dispatcher.forget(request)
        self.table.finish(request)
        self.metrics.outcomes.labels(str(request.outcome), str(request.reason)).inc()
        if request.first_text_at:
            self.metrics.first_token.observe(request.first_text_at - request.created)
        self.exporter.emit(trace.root_span(request))
        self.stops.on_request_settled(request)

    # --- leaders ------------------------------------------------------------------------------

    def _make_session(self, url: str, name: str) -> LeaderSession:
        return LeaderSession(
            url,
            name,
            gateway=self.settings.gateway_id,
            secret=self.settings.secret.get_secret_value(),
            epoch_grace_s=self.settings.epoch_grace_s,
            words=self.words,
            listener=Listener(
                receipt=self.stops.on_receipt,
                change=self._session_changed,
                draining=self._group_drains,
                refused=self.dispatcher.refused,
                mode=self._mode_changed,
                load=self._load_changed,
            ),
        )

    def _session_changed(self, session: LeaderSession) -> None:
        self.registry.compare_epochs()
        self.stops.on_session(session)
        self._mode_changed(session)

    def _mode_changed(self, _: LeaderSession) -> None:
        self.modes.touch()
        self.dispatcher.touch()

    def _load_changed(self, session: LeaderSession) -> None:
        if session.epoch is not None:
            load = session.load
            self.metrics.drafts(session.group, session.epoch, load["drafted"], load["accepted"])
