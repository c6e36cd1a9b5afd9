"""Span records: their JSON, their ids, the local store."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopway_telemetry import (
    SpanRecord,
    SpanStore,
    load_spans,
    make_traceparent,
    new_span_id,
    new_trace_id,
)
from stopway_telemetry.store import FILES_MAX

_VALUES = st.one_of(
    st.text(max_size=20),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.text(max_size=5), max_size=3),
)


def span(trace_id: str, start: float = 1.0, **fields: object) -> SpanRecord:
    """A record of that trace."""
    return SpanRecord("a", trace_id, new_span_id(), start, start + 1.0, **fields)  # type: ignore[arg-type]


@given(
    st.dictionaries(st.text(max_size=10), _VALUES, max_size=4),
    st.sampled_from(["internal", "server", "producer"]),
    st.sampled_from(["unset", "ok", "error"]),
)
def test_json_round_trip(attributes: dict[str, object], kind: str, status: str) -> None:
    record = span(
        new_trace_id(),
        attributes=attributes,
        kind=kind,
        status=status,
        parent_id=new_span_id(),
        links=((new_trace_id(), new_span_id()),),
    )
    assert SpanRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    "change",
    [
        {"trace_id": "xyz"},
        {"span_id": 5},
        {"start": "soon"},
        {"start": None},
        {"kind": "king"},
        {"status": "fine"},
        {"links": [["a", "b"]]},
        {"links": [1]},
        {"attributes": 5},
        {"name": None, "parent_id": "x"},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SpanRecord.from_json({**span(new_trace_id()).to_json(), **change})
    for nothing in (None, [], {}, "x"):
        with pytest.raises(ValueError):
            SpanRecord.from_json(nothing)


def test_ids() -> None:
    assert len(new_trace_id()) == 32 and len(new_span_id()) == 16
    assert new_span_id() != new_span_id()
    assert make_traceparent("a" * 32, "b" * 16) == f"00-{'a' * 32}-{'b' * 16}-01"


def test_store_rotates_and_loads_by_trace(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "new", "a service/x", file_bytes_max=4000)
    wanted = new_trace_id()
    for number in range(100):
        store.append([span(new_trace_id()), span(wanted, start=float(100 - number))])
    files = list((tmp_path / "new").iterdir())
    assert len(files) == 2 and sum(f.stat().st_size for f in files) < 9000
    with store.path.open("a") as file:
        file.write(f'{{"trace_id": "{wanted}", "cut off')
    found = load_spans(tmp_path / "new", wanted)
    assert found and {record.trace_id for record in found} == {wanted}
    assert [r.start for r in found] == sorted(r.start for r in found)
    assert load_spans(tmp_path / "none", wanted) == []


def test_store_sweeps_what_others_left(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 10):
        path = tmp_path / f"old-{number}.jsonl"
        path.write_text("{}\n")
        os.utime(path, (time.time() - number * 10,) * 2)
    ancient = tmp_path / "ancient.jsonl"
    ancient.write_text("{}\n")
    os.utime(ancient, (0, 0))
    SpanStore(tmp_path, "new").append([span(new_trace_id())])
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == FILES_MAX + 1 and "ancient.jsonl" not in left and "old-0.jsonl" in left
