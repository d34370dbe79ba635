"""A chart with axes: measured points with their ranges, and dashed lines for what was predicted. It needs no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.pages.html import text

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 40, 14, 34
"""Margins."""
MOST_TICKS = 6


@dataclass(frozen=True)
class Line:
    """One colour of a chart."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    """x, y, and the range of y."""
    dashed: Sequence[tuple[float, float]] = field(default_factory=tuple)
    """Predicted x and y."""


@dataclass(frozen=True)
class Axis:
    """A direction of a chart: its range, its ticks and their names."""

    low: float
    high: float
    ticks: Sequence[float]
    spell: Callable[[float], str]
    is_log: bool = False

    def place(self, value: float) -> float:
        """From 0 at the low end to 1 at the high one."""
        if self.is_log:
            span = math.log(self.high / self.low) or 1.0
            return math.log(max(value, self.low) / self.low) / span
        return (value - self.low) / ((self.high - self.low) or 1.0)


def log_axis(values: Sequence[float], spell: Callable[[float], str], base: float) -> Axis:
    """An axis from the least to the largest value, with ticks at powers of a base."""
    low, high = min(values), max(values)
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / MOST_TICKS))
    return Axis(low, high, [base**power for power in range(first, last + 1, every)], spell, is_log=True)


def linear_axis(high: float, spell: Callable[[float], str]) -> Axis:
    """An axis from 0, with round ticks."""
    step = 10 ** math.floor(math.log10(high / 4)) if high > 0 else 1.0
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if high / (factor * step) <= MOST_TICKS)
    count = math.ceil(high / step - 1e-9)
    return Axis(0.0, count * step, [number * step for number in range(count + 1)], spell)


def chart(lines: Sequence[Line], x: Axis, y: Axis, label: str) -> str:
    """The drawing."""
    drawn = [*_grid(x, y), *(part for number, line in enumerate(lines) for part in _line(line, x, y, number % 6))]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'<div class="wide"><svg class="plot" {box}><title>{text(label)}</title>{"".join(drawn)}</svg></div>'


def _across(x: Axis, value: float) -> float:
    return LEFT + x.place(value) * (WIDTH - LEFT - RIGHT)


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value in y.ticks:
        at = _down(y, value)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text(y.spell(value))}</text>'
    for value in x.ticks:
        yield f'<text x="{_across(x, value):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{text(x.spell(value))}</text>'


def _line(line: Line, x: Axis, y: Axis, number: int) -> Iterator[str]:
    if len(line.dashed) > 1:
        yield f'<path class="curve dash c{number}" d="{_path(line.dashed, x, y)}"/>'
    if len(line.points) > 1:
        yield f'<path class="curve c{number}" d="{_path([point[:2] for point in line.points], x, y)}"/>'
    for at, value, low, high in line.points:
        aside = 0 if low == high else (number - 2) * 3  # ranges of several lines do not cover each other
        here, title = _across(x, at) + aside, f"{line.name}, {x.spell(at)}: {y.spell(value)}"
        yield f'<path class="range c{number}" d="M{here:.1f} {_down(y, low):.1f}V{_down(y, high):.1f}"/>'
        dot = f'class="f{number}" cx="{here:.1f}" cy="{_down(y, value):.1f}" r="4"'
        yield f"<circle {dot}><title>{text(title)}</title></circle>"


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    places = (f"{_across(x, at):.1f} {_down(y, value):.1f}" for at, value in points)
    return "M" + "L".join(places)
