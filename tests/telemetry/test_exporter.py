"""The exporter against collectors that answer, fail, and never answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stopway_telemetry import Exporter, SpanRecord, load_spans, new_span_id, new_trace_id
from stopway_telemetry.otlp import traces_url


def span(trace_id: str, **fields: object) -> SpanRecord:
    """A record of that trace."""
    return SpanRecord("stop", trace_id, new_span_id(), 1.5, 2.5, **fields)  # type: ignore[arg-type]


class Collector:
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                message = ExportTraceServiceRequest.FromString(body)
                outer.requests.append((self.path, message))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that answers."""
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture
def black_hole() -> Iterator[socket.socket]:
    """Where a collector listens that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_endpoint_is_a_base_or_the_whole_url() -> None:
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("http://h/v1/traces") == "http://h/v1/traces"


def test_a_record_arrives_as_it_is(collector: Collector, tmp_path: Path) -> None:
    exporter = Exporter("svc", {"k": "v"}, collector.url, tmp_path)
    link = (new_trace_id(), new_span_id())
    record = span(
        new_trace_id(),
        parent_id=new_span_id(),
        attributes={"s": "x", "i": 3, "f": 0.5, "l": ["a", "b"], "b": True},
        links=(link,),
        kind="server",
        status="error",
    )
    exporter.emit(record)
    exporter.shutdown(30.0)
    ((path, message),) = collector.requests
    assert path == "/v1/traces"
    (resource,) = message.resource_spans
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert named == {"service.name": "svc", "k": "v"}
    (got,) = resource.scope_spans[0].spans
    assert got.trace_id.hex() == record.trace_id and got.span_id.hex() == record.span_id
    assert got.parent_span_id.hex() == record.parent_id
    assert (got.start_time_unix_nano, got.end_time_unix_nano) == (1_500_000_000, 2_500_000_000)
    assert (got.links[0].trace_id.hex(), got.links[0].span_id.hex()) == link
    assert (got.kind, got.status.code) == (2, 2)
    assert load_spans(tmp_path, record.trace_id) == [record]
    assert exporter.dropped == exporter.failed == 0


def test_case_t05_black_hole_neither_blocks_nor_delays_the_exit(
    black_hole: socket.socket, tmp_path: Path
) -> None:
    never = 60.0  # it would wait for the collector
    exporter = Exporter(
        "svc", {}, url_of(black_hole), tmp_path, queue_max=100, export_timeout_s=never
    )
    trace_id = new_trace_id()
    started = time.monotonic()
    for _ in range(10_000):
        exporter.emit(span(trace_id))
    assert exporter.dropped > 0  # counted, not waited for
    exporter.shutdown(0.5)
    assert time.monotonic() - started < never / 2
    exporter.emit(span(trace_id))
    exporter.shutdown(0.5)
    assert load_spans(tmp_path, trace_id)  # the local copy does not depend on the collector


def test_case_t05_process_exits_within_its_budget(black_hole: socket.socket) -> None:
    never = 60.0  # it would wait for the collector
    code = (
        "import sys\n"
        "from stopway_telemetry import *\n"
        f"e = Exporter('svc', {{}}, {url_of(black_hole)!r}, export_timeout_s={never})\n"
        "for _ in range(1000):\n"
        "    e.emit(SpanRecord('a', new_trace_id(), new_span_id(), 1.0, 2.0))\n"
        "sys.stdin.readline()\n"
        "e.shutdown(0.5)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "/usr/bin:/bin"},
    ) as process:
        try:
            connection, _ = black_hole.accept()  # an export is under way
            with connection:
                process.communicate(b"\n", timeout=never / 2)
        finally:
            process.kill()
    assert process.returncode == 0


def test_sinks_that_fail_are_counted(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    exporter = Exporter("svc", {}, None, blocked / "spans")
    exporter.emit(span(new_trace_id()))
    exporter.shutdown(30.0)
    assert exporter.failed == 1


def test_without_sinks_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    exporter = Exporter("svc")
    exporter.emit(span(new_trace_id()))
    assert set(threading.enumerate()) <= before
    exporter.shutdown(1.0)
    assert exporter.dropped == 0
