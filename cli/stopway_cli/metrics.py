"""Reading Prometheus text, as far as this tool needs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One series at one moment."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """The samples of an exposition; lines that are none are passed over."""
    found = []
    for line in text.splitlines():
        match = _SERIES.match(line)
        if line.startswith("#") or match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), value))
    return found


def total(samples: Iterable[Sample], name: str) -> float | None:
    """The sum of all series called ``name``; None when there are none."""
    values = [sample.value for sample in samples if sample.name == name]
    return sum(values) if values else None


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV blocks of one group, by state."""

    free: int
    held: int
    cached: int

    @property
    def total(self) -> int:
        return self.free + self.held + self.cached


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What one group does now."""

    running: int
    waiting: int
    blocks: Blocks


def groups(samples: Iterable[Sample]) -> dict[str, GroupLoad]:
    """Load per group, from the gateway's metrics."""
    by_group: dict[str, dict[str, int]] = {}
    for sample in samples:
        group = sample.labels.get("group")
        if group is None:
            continue
        values = by_group.setdefault(group, {})
        if sample.name == "stopway_kv_blocks":
            values[sample.labels.get("state", "")] = int(sample.value)
        elif sample.name in ("stopway_requests_running", "stopway_requests_waiting"):
            values[sample.name] = int(sample.value)
    return {
        group: GroupLoad(
            values.get("stopway_requests_running", 0),
            values.get("stopway_requests_waiting", 0),
            Blocks(values.get("free", 0), values.get("held", 0), values.get("cached", 0)),
        )
        for group, values in sorted(by_group.items())
        if "free" in values or "stopway_requests_running" in values
    }
