"""Drawings that need no script: curves, bars of parts, and a map of ranks over time. Colours come from the page."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence

from shoal.pages.html import text

Points = Sequence[tuple[float, float | None]]

WIDTH, HEIGHT = 640, 180
"""Of a curve, in its own units; the page scales it."""
LEVELS = 8
"""Shades of a map."""


def curves(lines: Sequence[Points], label: str, ticks: tuple[str, str]) -> str:
    """Curves over a common range. A value that is None breaks its curve. `ticks`: words of the lowest and highest."""
    known = [(x, y) for points in lines for x, y in points if y is not None and math.isfinite(y)]
    if not known:
        return ""
    left, right = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    across, up = WIDTH / ((right - left) or 1), (HEIGHT - 20) / ((high - low) or 1)
    parts = [
        f'<path class="curve c{number % 6}" d="{_path(points, left, low, across, up)}"/>'
        for number, points in enumerate(lines)
    ]
    drawn = f"<title>{text(label)}</title>{''.join(parts)}"
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" preserveAspectRatio="none">{drawn}</svg>'
    return f'<div class="fallback"><span>{text(ticks[1])}</span>{svg}<span>{text(ticks[0])}</span></div>'


def _path(points: Points, left: float, low: float, across: float, up: float) -> str:
    drawn, pen = [], "M"
    for x, y in points:
        if y is None or not math.isfinite(y):
            pen = "M"
            continue
        drawn.append(f"{pen}{(x - left) * across:.1f} {HEIGHT - 10 - (y - low) * up:.1f}")
        pen = "L"
    return "".join(drawn)


def stacked_bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar of parts that add to 1: the class of a colour, its name, its fraction."""
    boxes, x = [], 0.0
    for kind, name, fraction in parts:
        width = max(0.0, min(1000 - x, fraction * 1000))
        boxes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="0" width="{width:.1f}" height="34"><title>{text(name)}</title></rect>'
        )
        x += width
    return f'<svg class="bar" viewBox="0 0 1000 34" preserveAspectRatio="none" role="img">{"".join(boxes)}</svg>'


def stacked_columns(columns: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """A column for each stretch of a run: its title, and its parts from the bottom up."""
    if not columns:
        return ""
    width, drawn = 1000 / len(columns), []
    for number, (title, parts) in enumerate(columns):
        y, boxes = 100.0, []
        for kind, fraction in parts:
            height = max(0.0, min(y, fraction * 100))
            y -= height
            boxes.append(
                f'<rect class="{kind}" x="{number * width:.1f}" y="{y:.1f}" width="{max(1, width - 1.5):.1f}"'
                f' height="{height:.1f}"/>'
            )
        drawn.append(f"<g><title>{text(title)}</title>{''.join(boxes)}</g>")
    return f'<svg class="columns" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img">{"".join(drawn)}</svg>'


def heat_map(rows: Sequence[tuple[str, Sequence[float | None]]], label: str) -> str:
    """A line of cells for each name, each value from 0 to 1. Cells of one shade are one path, which is small."""
    if not rows:
        return ""
    number = max((len(cells) for _, cells in rows), default=0) or 1
    height = max(4, min(18, 640 // len(rows)))
    wide = 940 / number
    paths: list[list[str]] = [[] for _ in range(LEVELS)]
    for row, (_, cells) in enumerate(rows):
        for column, value in enumerate(cells):
            if value is not None:
                shade = min(LEVELS - 1, max(0, int(value * LEVELS)))
                paths[shade].append(f"M{60 + column * wide:.1f} {row * height}h{wide:.1f}v{height - 1}h-{wide:.1f}z")
    drawn = "".join(f'<path class="heat h{n}" d="{"".join(cells)}"/>' for n, cells in enumerate(paths) if cells)
    return (
        f'<div class="wide"><svg class="map" viewBox="0 0 1000 {height * len(rows)}" role="img"><title>{text(label)}'
        f"</title>{drawn}{''.join(_names(rows, height))}</svg></div>"
    )


def _names(rows: Sequence[tuple[str, Sequence[float | None]]], height: int) -> Iterator[str]:
    every = math.ceil(14 / height)
    for row, (name, _) in enumerate(rows):
        if row % every == 0:
            yield f'<text x="52" y="{row * height + max(10, height - 5)}" text-anchor="end">{text(name)}</text>'


def as_image(svg: str, label: str) -> str:
    """A drawing with styles of its own, apart from the page's."""
    coded = base64.b64encode(svg.encode()).decode()
    return f'<img class="drawing" alt="{text(label)}" src="data:image/svg+xml;base64,{coded}">'
