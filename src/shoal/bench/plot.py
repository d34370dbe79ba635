"""Draw a plot as SVG without dependencies: lines over logarithmic x and y, in panels side by side. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 420, 280
"""Size of a panel."""
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 34
"""Margins of a panel."""
COLUMNS = 2
COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490", "#444444", "#be123c")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines under one title."""

    title: str
    lines: Mapping[str, Points]
    """Name → measured points, drawn as dots."""
    curves: Mapping[str, Points] = field(default_factory=dict)
    """Name → predicted points, drawn as a thin line of the same colour."""
    level: float | None = None
    """Drawn as a dashed line."""
    level_name: str = ""


def svg(panels: Sequence[Panel], *, title: str, x_name: Callable[[float], str], y_name: Callable[[float], str]) -> str:
    """Draw all panels with the same scales, under one legend. `x_name` and `y_name` format the tick labels."""
    xs = [x for panel in panels for points in panel.lines.values() for x, _ in points]
    ys = [y for panel in panels for points in panel.lines.values() for _, y in points]
    ys += [panel.level for panel in panels if panel.level]
    x_scale = _Scale(min(xs), max(xs), 0, WIDTH - LEFT - RIGHT)
    y_scale = _Scale(min(ys), max(ys), HEIGHT - TOP - BOTTOM, 0)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    rows = math.ceil(len(panels) / COLUMNS)
    width, height = COLUMNS * WIDTH, 56 + rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, name in enumerate(names):
        x = 12 + number * 100
        parts.append(f'<circle cx="{x + 4}" cy="38" r="4" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 12}" y="42">{escape(name)}</text>')
    for number, panel in enumerate(panels):
        x, y = number % COLUMNS * WIDTH + LEFT, 56 + number // COLUMNS * HEIGHT + TOP
        parts.append(f'<g transform="translate({x},{y})">')
        parts += _axes(panel, x_scale, y_scale, x_name, y_name)
        parts += _lines(panel, x_scale, y_scale, colours)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Scale:
    """Map a number to a position, by its logarithm."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = math.log(self.high / self.low) or 1.0
        return self.begin + (self.end - self.begin) * math.log(value / self.low) / span

    def ticks(self, base: float) -> list[float]:
        """Powers of `base` within the scale, five at most."""
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / 5))
        return [base**power for power in range(first, last + 1, every)]


def _axes(
    panel: Panel, x_scale: _Scale, y_scale: _Scale, x_name: Callable[[float], str], y_name: Callable[[float], str]
) -> list[str]:
    right, bottom = x_scale.end, y_scale.begin
    parts = [
        f'<text x="0" y="-10" font-size="12">{escape(panel.title)}</text>',
        f'<rect width="{right}" height="{bottom}" fill="none" stroke="#999"/>',
    ]
    for value in x_scale.ticks(4.0):
        x = x_scale(value)
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{escape(x_name(value))}</text>')
    for value in y_scale.ticks(10.0):
        y = y_scale(value)
        parts.append(f'<line x1="0" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="-4" y="{y + 4:.1f}" text-anchor="end">{escape(y_name(value))}</text>')
    if panel.level:
        y = y_scale(panel.level)
        parts.append(f'<line x1="0" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#222" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="4" y="{y - 3:.1f}">{escape(panel.level_name)}</text>')
    return parts


def _lines(panel: Panel, x_scale: _Scale, y_scale: _Scale, colours: dict[str, str]) -> list[str]:
    parts = []
    for name, points in panel.curves.items():
        path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="0.8"/>')
    for name, points in panel.lines.items():
        for x, y in points:
            parts.append(f'<circle cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="2.6" fill="{colours[name]}"/>')
    return parts
