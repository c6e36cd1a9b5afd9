"""``stopway trace``: which trace an id belongs to, where its spans are, and the picture."""

from __future__ import annotations

import re
import time
from pathlib import Path

from stopway_cli import render, waterfall
from stopway_cli.client import Api, Server, find_server
from stopway_cli.errors import CliError, Exit
from stopway_cli.stack import state
from stopway_cli.waterfall import Span

_TEXT_WIDTH = 70  # of a waterfall's row, bars aside
_TRACE_ID = re.compile(r"^[0-9a-f]{32}$")


def local_spans(directory: Path, trace_id: str) -> list[Span]:
    """The spans of a trace that the processes of a local stack kept in ``directory``."""
    from stopway_telemetry import load_spans

    return [
        Span(r.span_id, r.parent_id, r.name, r.start, r.end, r.attributes)
        for r in load_spans(directory, trace_id)
    ]


async def jaeger_spans(url: str, trace_id: str) -> list[Span]:
    """The spans of a trace from Jaeger's query API at ``url`` (its UI's address)."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=10.0) as http:
            response = await http.get(f"{url.rstrip('/')}/api/traces/{trace_id}")
            if response.status_code == 404:
                return []
            response.raise_for_status()
            return waterfall.from_jaeger(response.json())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise CliError(
            f"Jaeger's query API at {url} does not answer as expected ({type(error).__name__}); "
            "pass the address of its UI, such as --jaeger http://localhost:16686",
            Exit.SERVER,
        ) from None


async def trace_of(ident: str, server: Server) -> tuple[str, str]:
    """(trace id, stop id or "") of a request's or a stop's id."""
    async with Api(server) as api:
        for path, is_stop in ((f"/v1/requests/{ident}", False), (f"/v1/stops/{ident}", True)):
            found = await api.find(path)
            if found is not None and found.get("trace_id"):
                return str(found["trace_id"]), ident if is_stop else ""
    raise CliError(
        f"{ident} is no request or stop of the last 10 minutes here; pass its trace id instead",
        Exit.SERVER,
    )


async def run(ident: str, url: str, key: str, spans_dir: Path | None, jaeger: str) -> None:
    """Print the waterfall of ``ident``. Raises ``CliError`` when there are no spans."""
    local = None if url else state.running()
    if _TRACE_ID.match(ident):
        trace_id, stop_id = ident, ""
    else:
        trace_id, stop_id = await trace_of(ident, find_server(url, key))
    if spans_dir is None and local is not None:
        spans_dir = Path(local.spans_dir)
    if jaeger:
        spans = await jaeger_spans(jaeger, trace_id)
    elif spans_dir is not None:
        spans = local_spans(spans_dir, trace_id)
    else:
        raise CliError(
            "no local stack is running here; say where the spans are with --jaeger URL or "
            "--spans-dir DIR",
            Exit.SERVER,
        )
    if not spans:
        raise CliError(
            f"no spans of trace {trace_id} there; spans of long ago are removed", Exit.FAILED
        )
    show((waterfall.subtree(spans, stop_id) or spans) if stop_id else spans, trace_id)


def show(spans: list[Span], trace_id: str) -> None:
    """Print a waterfall under one line about its trace."""
    out = render.console()
    newest = max(span.end for span in spans)
    out.print(f"[bold]trace[/] {trace_id}  [dim]{len(spans)} spans, {_ago(newest)}[/]")
    width = max(10, min(waterfall.BAR_WIDTH, out.width - _TEXT_WIDTH))
    out.print(waterfall.render(spans, width=width, ascii_only=not render.draws_blocks(out)))


def _ago(moment: float) -> str:
    return f"{max(0.0, time.time() - moment):.0f} s ago"
