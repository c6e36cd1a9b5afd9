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
from stopway_core.types import Outcome, Reason, Stop, StopStatus, Target, covers, outcome_of
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
from stopway_gateway.stops import REQUEST_IDS_MAX, Part, StopRecord
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
            lambda healthy: metrics.bus_up.set(int(healthy)),
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
        ended = [
            request
            for uid in target.uids
            if (request := self._table.get(uid, principal)) is not None
            and request.outcome is not None
        ]
        record = self._new_record(target, reason, principal, [*matched, *ended])
        self._records[record.stop.stop_id] = record
        self._metrics.stop_signals.labels(str(reason)).inc()
        groups = self._groups(target, matched)
        for request in matched:
            self._cut(request, record.stop, record)
        for request in ended:
            record.here[str(request.outcome)] += 1
            _list_stop(request, record.stop.stop_id)
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
        record = StopRecord(stop, span, notify_id)
        for request in requests:
            record.add_match(request)
        return record

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

    def _cut(self, request: Request, stop: Stop, record: StopRecord | None) -> bool:
        """Stop delivering; whether that ended it, because no leader had it yet."""
        _list_stop(request, stop.stop_id)
        if request.dispatched:
            # A selector may pass its leader before the request does; and what came from another
            # gateway may be long resolved there.
            request.leader_told |= record is not None and bool(stop.target.uids)
            request.cut_by(stop.reason)
            return False
        if record is not None:
            record.stopped_here = True
            record.here[str(outcome_of(stop.reason))] += 1
            record.parts.setdefault(self._here, self._here_part(stop.stop_id))
        request.settle(stop.reason)
        return True

    def _here_part(self, stop_id: str) -> Part:
        return Part(stop_id, self._here, status=StopStatus.RECLAIMED)

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
            record = self._remote_record(receipt)
        group = str(receipt["group"])
        part = record.parts.get(group)
        if part is None:
            part = record.parts[group] = Part(record.stop.stop_id, group)
        if part.merge(receipt):
            if part.status is StopStatus.RECLAIMED and not part.unknown and not record.remote:
                stop_trace.observe(record, part, self._metrics)
            self._update(record)

    def on_request_settled(self, request: Request) -> None:
        """Its stops may be waiting for just that."""
        for stop_id in request.stop_ids:
            record = self._records.get(stop_id)
            if record is not None:
                self._update(record)

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

    def _remote_record(self, receipt: dict[str, Any]) -> StopRecord:
        """Another gateway's stop, as far as its receipts tell; so this one can show it, too."""
        stop = Stop(
            stop_id=str(receipt["stop_id"]),
            target=Target(),
            reason=Reason(receipt["reason"]),
            tenant=str(receipt.get("tenant") or ""),
            admin=True,
            issued_at=time.time(),
        )
        trace_id = str(receipt.get("trace_id") or "")
        record = StopRecord(stop, Trace(trace_id, ""), "", remote=True)
        record.traced.update(("stop", "notify"))  # the one who issued it makes its spans
        self._records[stop.stop_id] = record
        self._trim()
        return record

    # --- from Redis ---------------------------------------------------------------------------

    def _on_entry(self, fields: dict[str, str]) -> None:
        """A stop on the gateways' stream: it may mean requests that no leader has yet."""
        try:
            stop = verify(
                json.loads(fields["stop"]),
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
        ended_here = [
            request
            for request in self._table.matching(stop.target, principal)
            if covers(stop, request.uid, request.created) and self._cut(request, stop, None)
        ]
        known = [
            request
            for uid in stop.target.uids
            if (request := self._table.get(uid, principal)) is not None
            and request.outcome is not None
            and request not in ended_here
        ]
        if ended_here or known:
            self._tell_gateways(stop, ended_here, known)

    def _tell_gateways(self, stop: Stop, stopped: list[Request], known: list[Request]) -> None:
        requests = [*stopped, *known]
        outcome = {str(o): sum(r.outcome is o for r in requests) for o in Outcome}
        status = StopStatus.RECLAIMED if stopped else StopStatus.ALREADY_FINISHED
        receipt = {
            "stop_id": stop.stop_id,
            "group": self._here,
            "epoch": None,
            "status": str(status),
            "reason": str(stop.reason),
            "tenant": stop.tenant,
            "trace_id": names.trace_id_of(stop.traceparent),
            "outcome": outcome,
            "request_ids": [request.uid for request in requests[:REQUEST_IDS_MAX]],
            "count": len(requests),
            "turn_effective": None,
            "pending_on": [],
            "ranks": [],
        }
        self.publisher.publish_receipt(receipt, self._receipts_stream)

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


def _list_stop(request: Request, stop_id: str) -> None:
    if stop_id not in request.stop_ids and len(request.stop_ids) < _STOP_IDS_MAX:
        request.stop_ids.append(stop_id)
