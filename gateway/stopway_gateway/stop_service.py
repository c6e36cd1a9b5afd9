"""Where stops are made, sent, answered for and remembered."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stopway_core import names
from stopway_core.signing import StopError, verify
from stopway_core.types import Reason, Stop, StopStatus, Target, covers
from stopway_gateway import stop_trace
from stopway_gateway.auth import Principal
from stopway_gateway.config import Settings
from stopway_gateway.metrics import Metrics
from stopway_gateway.registry import Registry
from stopway_gateway.request import Request, Trace
from stopway_gateway.requests_table import RequestsTable
from stopway_gateway.resender import Resender
from stopway_gateway.session import LeaderSession
from stopway_gateway.stop_bus import Gaps, Publisher, Reader
from stopway_gateway.stops import END_OWED, REQUEST_IDS_MAX, RESOLVED, Part, StopRecord
from stopway_telemetry import Exporter, make_traceparent, new_span_id, new_trace_id

_LOG = logging.getLogger(__name__)
_STOP_IDS_MAX = 100  # that one request lists


class StopService:
    """All stops of this gateway, and what other gateways' stops mean for its requests."""

    def __init__(
        self,
        settings: Settings,
        table: RequestsTable,
        registry: Registry,
        metrics: Metrics,
        exporter: Exporter,
    ) -> None:
        self._settings = settings
        self._table = table
        self._registry = registry
        self._metrics = metrics
        self._exporter = exporter
        self._records: OrderedDict[str, StopRecord] = OrderedDict()
        self._gaps = Gaps()
        self._keys = {"1": settings.secret.get_secret_value()}
        self._here = f"gateway:{settings.gateway_id}"
        self._publisher_id = names.publisher_id(settings.gateway_id, secrets.token_hex(4))
        self._gateway_stream = names.gateway_stops_stream(settings.service_uid)
        self._receipts_stream = names.receipts_stream(settings.service_uid)
        self.resender = Resender(settings, registry, metrics)
        self.publisher = Publisher(
            settings.redis_url,
            self._publisher_id,
            self._keys["1"],
            settings.stop_stream_age_s,
            self._on_bus,
        )
        self.reader = Reader(
            settings.redis_url,
            {self._gateway_stream: self._on_entry, self._receipts_stream: self._on_receipt_entry},
        )

    def start(self) -> None:
        """Begin to read, write and re-send."""
        self.resender.start()
        self.publisher.start()
        self.reader.start()

    async def close(self) -> None:
        """End all of it; what is not resolved is traced as far as it came."""
        await self.reader.close()
        await self.publisher.close()
        await self.resender.close()
        for record in self._records.values():
            stop_trace.emit(record, self._exporter, final=True)

    # --- making a stop ------------------------------------------------------------------------

    def issue(self, target: Target, reason: Reason, principal: Principal) -> StopRecord:
        """Accept a stop: cut what it matches here, tell the groups, and answer for it."""
        matched = self._table.matching(target, principal)
        ended = self._ended(target, principal)
        record = self._new_record(target, reason, principal, [*matched, *ended])
        self._records[record.stop.stop_id] = record
        self._metrics.stop_signals.labels(str(reason)).inc()
        groups = self._groups(target, matched)
        self._take(record, matched, ended)
        for group, group_target in groups.items():
            # Who is not with its leader yet is in its front, which reads nothing but sessions.
            unready = any(r.group == group and not r.accepted for r in matched)
            self._send(record, group, group_target, at_once=unready)
        if not target.uids or any(not self._table.mine(uid) for uid in target.uids):
            self.publisher.publish(record.stop, self._gateway_stream, lambda: None)
        self._update(record)
        self._trim()
        return record

    def issue_for(self, request: Request, reason: Reason) -> StopRecord:
        """A stop that the gateway itself has a reason for."""
        return self.issue(Target(uids=(request.uid,)), reason, Principal(request.tenant, False))

    def _new_record(
        self, target: Target, reason: Reason, principal: Principal, requests: list[Request]
    ) -> StopRecord:
        notify_id = new_span_id()
        if len(target.uids) == 1 and requests:
            root = requests[0].trace
            span = Trace(root.trace_id, new_span_id(), parent_id=root.span_id)
        else:
            links = tuple((r.trace.trace_id, r.trace.span_id) for r in requests[:REQUEST_IDS_MAX])
            span = Trace(new_trace_id(), new_span_id(), links=links)
        # Before anything is sent: on one clock, nobody notices it earlier than it was accepted.
        now = time.time()
        stop = Stop(
            stop_id=f"stop-{int(now * 1000):x}-{secrets.token_hex(8)}",
            target=target,
            reason=reason,
            tenant=principal.tenant,
            admin=principal.admin,
            issued_at=now,
            traceparent=make_traceparent(span.trace_id, notify_id),
        )
        return StopRecord(stop, span, notify_id)

    def _ended(self, target: Target, principal: Principal) -> list[Request]:
        """The requests of this gateway that are named and have ended."""
        found = (self._table.get(uid, principal) for uid in target.uids)
        return [request for request in found if request is not None and request.outcome is not None]

    def _take(self, record: StopRecord, matched: list[Request], ended: list[Request]) -> None:
        """Have a stop take effect on the requests of this gateway that it is aimed at."""
        for request in (*matched, *ended):
            record.add_match(request, listed=_list_stop(request, record.stop.stop_id))
        for request in ended:
            record.here[str(request.outcome)] += 1
        for request in matched:
            self._cut(request, record)

    def _groups(self, target: Target, matched: Sequence[Request]) -> dict[str, Target]:
        """Which groups are told of what: their own requests, or all that we don't know."""
        if not target.uids:
            return dict.fromkeys(self._registry.groups(), target)
        foreign = [uid for uid in target.uids if not self._table.mine(uid)]
        uids = {group: list(foreign) for group in self._registry.groups()} if foreign else {}
        for request in matched:
            if request.dispatched:
                uids.setdefault(request.group, []).append(request.uid)
        return {group: Target(uids=tuple(ids)) for group, ids in uids.items()}

    def _cut(self, request: Request, record: StopRecord) -> None:
        """Stop delivering; that ends it where no leader has it yet."""
        stop = record.stop
        if request.dispatched:
            # A selector may pass its leader before the request does; and what came from another
            # gateway may be long resolved there.
            request.leader_told |= not record.remote and bool(stop.target.uids)
            request.cut_by(stop.reason)
            return
        if self._here not in record.parts:
            part = Part(stop.stop_id, self._here, status=StopStatus.RECLAIMED)
            record.parts[self._here] = part
        request.settle(stop.reason)

    def _send(self, record: StopRecord, group: str, target: Target, *, at_once: bool) -> None:
        part = Part(record.stop.stop_id, group)
        record.parts[group] = part
        stream = names.stops_stream(self._settings.service_uid, group)
        stop = replace(record.stop, target=target)
        part.signed, going = self.publisher.publish(
            stop, stream, lambda: self.resender.direct(part)
        )
        self.resender.add(part, at_once=at_once or not going)

    # --- what comes back ----------------------------------------------------------------------

    def on_receipt(self, receipt: dict[str, Any]) -> None:
        """A receipt from a leader, or from another gateway. Raises on one that is malformed."""
        record = self._records.get(str(receipt["stop_id"]))
        if record is None:
            record = self._remember(_stop_of(receipt), str(receipt.get("trace_id") or ""))
        group = str(receipt["group"])
        part = record.parts.get(group)
        if part is None:
            part = record.parts[group] = Part(record.stop.stop_id, group)
        if part.merge(receipt):
            self._ask_named(record, part)
            if part.status is StopStatus.RECLAIMED and not part.unknown and not record.remote:
                stop_trace.observe(record, part, self._metrics)
            self._update(record)

    def on_request_settled(self, request: Request) -> None:
        """Its stops may be waiting for just that."""
        for stop_id in request.stop_ids:
            record = self._records.get(stop_id)
            if record is None:
                continue
            record.end(request)
            self._update(record)

    def _ask_named(self, record: StopRecord, part: Part) -> None:
        """A gateway names the groups that answer for its requests: they may be none of ours.

        Who made the stop asks them, too, and so does not depend on what it may never be told.
        """
        for group in part.groups:
            if group in record.parts:
                continue
            if record.remote:
                record.parts[group] = Part(record.stop.stop_id, group)
            else:
                self._send(record, group, record.stop.target, at_once=False)
            record.parts[group].named_only = True
        if part.groups or part.defers:
            for gone in record.unnamed():
                self.resender.discard(gone)

    def on_session(self, session: LeaderSession) -> None:
        """A leader came (back): ask it again for all that it has not resolved."""
        if not session.connected:
            return
        for record in self._records.values():
            part = record.parts.get(session.group)
            if part is not None and part.signed and not part.resolved:
                part.asked_again = True
                part.attempts = 0
                self.resender.add(part, at_once=True)

    def _update(self, record: StopRecord) -> None:
        stop_trace.emit(record, self._exporter)
        record.touch()
        if record.remote and record.matched:
            self._tell_gateways(record)

    def _remember(self, stop: Stop, trace_id: str) -> StopRecord:
        """Another gateway's stop; so this one can show it, too."""
        record = StopRecord(stop, Trace(trace_id, ""), "", remote=True)
        record.traced.update(("stop", "notify"))  # the one who issued it makes its spans
        self._records[stop.stop_id] = record
        self._trim()
        return record

    # --- from Redis ---------------------------------------------------------------------------

    def _on_entry(self, fields: dict[str, str]) -> None:
        """A stop on the gateways' stream: it may mean requests that only this gateway knows of."""
        try:
            signed = json.loads(fields["stop"])
            stop = verify(
                signed,
                self._keys,
                now=time.time(),
                age_max_s=self._settings.stop_stream_age_s,
            )
        except (KeyError, ValueError, RecursionError, StopError) as error:
            self._metrics.bad_entries.inc()
            _LOG.warning("a stop entry was passed over: %s", error)
            return
        self._metrics.stream_gaps.inc(self._gaps.missed(stop.publisher, stop.sequence))
        if stop.publisher == self._publisher_id:
            return
        principal = Principal(stop.tenant, stop.admin)
        found = self._table.matching(stop.target, principal)
        matched = [request for request in found if covers(stop, request.uid, request.created)]
        ended = self._ended(stop.target, principal)
        if not matched and not ended:
            return
        record = self._records.get(stop.stop_id)
        if record is None:
            record = self._remember(stop, names.trace_id_of(stop.traceparent))
        record.stop = stop  # receipts may have come first, and tell less
        self._take(record, matched, ended)
        self._pass_on(record, signed)
        self._update(record)

    def _pass_on(self, record: StopRecord, signed: dict[str, Any]) -> None:
        """Tell the leaders of its requests here, whom the stop's own gateway may not know.

        They take it once, however often it comes; and their fronts, which may still prepare one of
        the requests, read nothing but sessions.
        """
        for group in record.answering:
            part = record.parts.setdefault(group, Part(record.stop.stop_id, group))
            part.signed = signed
            self.resender.add(part, at_once=True)

    def _tell_gateways(self, record: StopRecord) -> None:
        """Whose requests they are, at once; and when all ended, what no leader answers for."""
        status = record.status_here
        if status is record.told:
            return
        stop = record.stop
        receipt = {
            "stop_id": stop.stop_id,
            "group": self._here,
            "epoch": None,
            "status": str(status),
            "reason": str(stop.reason),
            "tenant": stop.tenant,
            "trace_id": record.span.trace_id,
            "outcome": record.here,
            "request_ids": [request.uid for request in record.matched],
            "count": sum(record.here.values()),
            "groups": record.answering,
            "turn_effective": None,
            "pending_on": [] if status in RESOLVED else [f"{self._here}: {END_OWED}"],
            "ranks": [],
        }

        def lost() -> None:
            record.told = None  # said again when Redis is back

        if self.publisher.publish_receipt(receipt, self._receipts_stream, lost):
            record.told = status

    def _on_bus(self, healthy: bool) -> None:
        self._metrics.bus_up.set(int(healthy))
        if healthy:
            for record in self._records.values():
                if record.remote and record.matched:
                    self._tell_gateways(record)

    def _on_receipt_entry(self, fields: dict[str, str]) -> None:
        try:
            receipt = json.loads(fields["receipt"])
            if receipt["group"] != self._here:
                self.on_receipt(receipt)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            self._metrics.bad_entries.inc()
            _LOG.warning("a receipt was passed over: %s", error)

    # --- reading them -------------------------------------------------------------------------

    def get(self, stop_id: str, principal: Principal) -> StopRecord | None:
        """The stop, unless there is none or it is not this principal's to see."""
        record = self._records.get(stop_id)
        if record is None:
            return None
        own = principal.reaches(record.stop.tenant) or record.tenants == {principal.tenant}
        return record if own else None

    def _trim(self) -> None:
        horizon = time.time() - self._settings.keep_s
        while self._records:
            oldest = next(iter(self._records.values()))
            if len(self._records) <= self._settings.keep_max and oldest.stop.issued_at > horizon:
                return
            self._records.popitem(last=False)
            stop_trace.emit(oldest, self._exporter, final=True)
            for part in oldest.parts.values():
                self.resender.discard(part)


def _list_stop(request: Request, stop_id: str) -> bool:
    """Whether the request has the stop among its own; it has at most ``_STOP_IDS_MAX``."""
    if stop_id not in request.stop_ids and len(request.stop_ids) < _STOP_IDS_MAX:
        request.stop_ids.append(stop_id)
    return stop_id in request.stop_ids


def _stop_of(receipt: dict[str, Any]) -> Stop:
    """A stop as far as a receipt tells. Raises on one that is malformed."""
    return Stop(
        stop_id=str(receipt["stop_id"]),
        target=Target(),
        reason=Reason(receipt["reason"]),
        tenant=str(receipt.get("tenant") or ""),
        admin=True,
        issued_at=time.time(),
    )
