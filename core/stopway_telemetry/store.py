"""A bounded local store of span records: one JSON lines file per process, rotated by size."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from stopway_telemetry.records import SpanRecord

FILE_BYTES_MAX = 8 * 1024 * 1024
FILES_MAX = 64
FILE_AGE_S_MAX = 24 * 3600.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class SpanStore:
    """Appends records to ``DIR/SERVICE-PID.jsonl``; a full file becomes ``.jsonl.1``.

    So one process keeps at most twice ``file_bytes_max``, and a directory at most ``FILES_MAX``
    files. Not for concurrent use: one thread writes.
    """

    def __init__(
        self, directory: Path, service_name: str, *, file_bytes_max: int = FILE_BYTES_MAX
    ) -> None:
        self._directory = directory
        self._path = directory / f"{_UNSAFE.sub('_', service_name)}-{os.getpid()}.jsonl"
        self._file_bytes_max = file_bytes_max
        self._swept = False

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._path

    def append(self, records: Iterable[SpanRecord]) -> None:
        """Write ``records``. Raises ``OSError`` when the disk does."""
        lines = [json.dumps(record.to_json(), separators=(",", ":")) for record in records]
        if not lines:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            self._sweep()
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
            size = file.tell()
        if size >= self._file_bytes_max:
            self._path.replace(self._path.with_suffix(".jsonl.1"))

    def _sweep(self) -> None:
        """Remove what processes that are long gone left behind."""
        self._swept = True
        oldest_first = sorted(_files(self._directory), key=_mtime)
        surplus = len(oldest_first) - FILES_MAX
        horizon = time.time() - FILE_AGE_S_MAX
        for index, path in enumerate(oldest_first):
            if index < surplus or _mtime(path) < horizon:
                with contextlib.suppress(OSError):
                    path.unlink()


def load_spans(directory: Path | str, trace_id: str) -> list[SpanRecord]:
    """All records of one trace in ``directory``, of every process, by start time.

    A line that can't be read (cut off by a crash) is passed over.
    """
    found: dict[str, SpanRecord] = {}
    for path in _files(Path(directory)):
        with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if trace_id not in line:
                    continue
                with contextlib.suppress(ValueError):
                    record = SpanRecord.from_json(json.loads(line))
                    if record.trace_id == trace_id:
                        found[record.span_id] = record
    return sorted(found.values(), key=lambda record: (record.start, record.end))


def _files(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted([*directory.glob("*.jsonl"), *directory.glob("*.jsonl.1")])
    return []


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
