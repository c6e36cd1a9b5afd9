"""Plots as inline SVG, drawn by hand: colours are CSS classes, so that light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_LABEL, _WIDTH, _ROW = 110, 560, 24
_LEFT, _TOP, _PLOT_W, _PLOT_H = 46, 12, 500, 230
_LEAST_MS = 0.1


def bars(names: Sequence[str], values: Sequence[float | None], digits: int) -> str:
    """A horizontal bar for each name, its value beside it; the longest fills the width."""
    most = max((v for v in values if v is not None), default=0.0) or 1.0
    room = _WIDTH - _LABEL - 90
    rows = []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        y = index * _ROW
        length = max(1.0, room * (value or 0.0) / most)
        text = "-" if value is None else f"{value:,.{digits}f}"
        rows.append(
            f'<text class="label" x="{_LABEL - 8}" y="{y + 16}" text-anchor="end">'
            f"{escape(name)}</text>"
            f'<rect class="fill{index}" x="{_LABEL}" y="{y + 4}" width="{length:.1f}" height="16" '
            f'rx="2"/>'
            f'<text class="value" x="{_LABEL + length + 6:.1f}" y="{y + 16}">{text}</text>'
        )
    height = len(names) * _ROW
    return _svg(_WIDTH, height, "".join(rows))


def cdfs(names: Sequence[str], series: Sequence[Sequence[float]]) -> str:
    """Cumulative distributions over milliseconds on a log scale; ``series`` are quantiles in s."""
    points = [[max(_LEAST_MS, q * 1000) for q in quantiles] for quantiles in series]
    there = [value for each in points for value in each]
    if not there:
        return '<p class="none">Nothing was stopped.</p>'
    low = math.floor(math.log10(min(there) / 1.5))  # so that none lies on the axis
    high = max(low + 1, math.ceil(math.log10(max(there))))
    parts = [_grid(low, high)]
    for index, each in enumerate(points):
        last = len(each) - 1
        path = " ".join(
            f"{_x(value, low, high):.1f},{_y(at / last):.1f}" for at, value in enumerate(each)
        )
        if path:
            parts.append(
                f'<polyline class="line{index}" points="{path}">'
                f"<title>{escape(names[index])}</title></polyline>"
            )
    return _svg(_LEFT + _PLOT_W + 14, _TOP + _PLOT_H + 40, "".join(parts))


def legend(names: Sequence[str]) -> str:
    """Which colour is whose."""
    keys = "".join(
        f'<span><i class="key{index}"></i>{escape(name)}</span>' for index, name in enumerate(names)
    )
    return f'<p class="legend">{keys}</p>'


def _grid(low: int, high: int) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _PLOT_W}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{share:.0%}</text>"
        )
    for power in range(low, high + 1):
        x = _x(10.0**power, low, high)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _PLOT_H}"/>'
            f'<text class="tick" x="{x:.1f}" y="{_TOP + _PLOT_H + 16}" text-anchor="middle">'
            f"{10.0**power:g}</text>"
        )
    middle = _LEFT + _PLOT_W / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{_TOP + _PLOT_H + 34}" text-anchor="middle">'
        "milliseconds after the client gave up (log scale)</text>"
    )
    return "".join(parts)


def _x(value: float, low: int, high: int) -> float:
    return _LEFT + _PLOT_W * (math.log10(value) - low) / (high - low)


def _y(share: float) -> float:
    return _TOP + _PLOT_H * (1 - share)


def _svg(width: float, height: float, inside: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{inside}</svg>'
