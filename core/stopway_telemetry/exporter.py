"""From a span record to the collector and the local store, on threads of their own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from stopway_telemetry.otlp import OtlpPipe
from stopway_telemetry.records import SpanRecord
from stopway_telemetry.store import SpanStore

_LOG = logging.getLogger(__name__)
_BATCH_MAX = 256


class Exporter:
    """Takes finished spans; never blocks, never raises.

    A bounded queue stands between the caller and a daemon thread; a record that finds it full is
    dropped and counted in ``dropped``. ``otlp_endpoint`` may be a base URL (``http://host:4318``)
    or the full path to ``/v1/traces``. ``spans_dir`` keeps a bounded copy for ``load_spans``.
    """

    def __init__(
        self,
        service_name: str,
        resource: Mapping[str, str] | None = None,
        otlp_endpoint: str | None = None,
        spans_dir: str | Path | None = None,
        *,
        queue_max: int = 8192,
        export_timeout_s: float = 5.0,
    ) -> None:
        self.dropped = 0
        self.failed = 0
        self._queue: queue.Queue[SpanRecord | None] = queue.Queue(queue_max)
        self._store = SpanStore(Path(spans_dir), service_name) if spans_dir else None
        self._otlp = (
            OtlpPipe(service_name, dict(resource or {}), otlp_endpoint, export_timeout_s)
            if otlp_endpoint
            else None
        )
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store or self._otlp:
            self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
            self._thread.start()

    def emit(self, record: SpanRecord) -> None:
        """Hand ``record`` over."""
        if self._thread is None:
            return
        if self._closing.is_set():
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout_s``; what is left then is lost."""
        if self._thread is None or self._closing.is_set():
            return
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.dropped += self._queue.qsize()
        if self._otlp is not None:
            self._otlp.shutdown(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            batch, ended = self._take()
            if batch:
                self._write(batch)
            if ended or (self._closing.is_set() and self._queue.empty()):
                return

    def _take(self) -> tuple[list[SpanRecord], bool]:
        """The next records, and whether the end of the queue was among them."""
        batch: list[SpanRecord] = []
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=0.5)
            while item is not None:
                batch.append(item)
                if len(batch) >= _BATCH_MAX:
                    return batch, False
                item = self._queue.get_nowait()
            return batch, True
        return batch, False

    def _write(self, batch: list[SpanRecord]) -> None:
        # Whatever goes wrong with one sink must neither end the thread nor starve the other.
        appends = [sink.append for sink in (self._store, self._otlp) if sink is not None]
        for append in appends:
            try:
                append(batch)
            except Exception as error:
                if not self.failed:
                    _LOG.warning("spans are not kept: %s", error)
                self.failed += len(batch)
