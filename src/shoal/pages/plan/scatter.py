"""Memory against time of many plans, as a drawing: a dot for each, whose title is the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.pages.html import text

LEFT, RIGHT, TOP, BOTTOM = 76, 984, 14, 372
"""Edges of the area with dots; the drawing is 1000 x 420."""
MANY = 6
"""If the slowest takes this many times as long as the fastest, times are drawn on a logarithmic scale."""


class Dot(NamedTuple):
    """A plan in the drawing."""

    x: float
    y: float
    title: str
    kind: str
    """plan, frontier or best: the class of its colour."""


def scatter(
    dots: Sequence[Dot], names: tuple[str, str], say: tuple[Callable[[float], str], Callable[[float], str]]
) -> str:
    """The drawing. `names` and `say`: the title of each axis, and how a value on it is written."""
    if not dots:
        return ""
    high_x = max(dot.x for dot in dots) * 1.05 or 1.0
    low, high = min(dot.y for dot in dots), max(dot.y for dot in dots)
    is_log = low > 0 and high > MANY * low
    scale: Callable[[float], float] = math.log if is_log else float
    bottom, top = (scale(low / 1.1), scale(high * 1.1)) if is_log else (0.0, high * 1.08 or 1.0)

    def across(x: float) -> float:
        return LEFT + (RIGHT - LEFT) * x / high_x

    def down(y: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (scale(y) - bottom) / ((top - bottom) or 1)

    rungs = _rungs(low, high) if is_log else ticks(high * 1.05)
    lines = [_line(across(x), say[0](x)) for x in ticks(high_x)] + [_rung(down(y), say[1](y)) for y in rungs]
    drawn = [
        f'<circle class="point {dot.kind}" cx="{across(dot.x):.1f}" cy="{down(dot.y):.1f}"'
        f' r="{4 if dot.kind == "plan" else 6}"><title>{text(dot.title)}</title></circle>'
        for dot in dots
    ]
    titles = (
        f'<text x="{RIGHT}" y="414" text-anchor="end">{text(names[0])}</text>'
        f'<text x="{LEFT + 8}" y="{TOP + 10}">{text(names[1])}{" (logarithmic)" if is_log else ""}</text>'
    )
    drawn_all = f"{''.join(lines)}{titles}{''.join(drawn)}"
    return f'<div class="wide"><svg class="map" viewBox="0 0 1000 420" role="img">{drawn_all}</svg></div>'


def ticks(high: float, most: int = 6) -> list[float]:
    """Round values from 0 to `high`.

    >>> ticks(80)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    if not 0 < high < math.inf:
        return [0.0]
    rough = high / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    return [step * number for number in range(int(high / step * 1.0001) + 1)]


def _rungs(low: float, high: float) -> list[float]:
    """Values at even ratios."""
    return [low * (high / low) ** (number / 4) for number in range(5)]


def _line(x: float, label: str) -> str:
    return (
        f'<path class="rule" d="M{x:.1f} {TOP}V{BOTTOM}"/>'
        f'<text x="{x:.1f}" y="392" text-anchor="middle">{text(label)}</text>'
    )


def _rung(y: float, label: str) -> str:
    return (
        f'<path class="rule" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text(label)}</text>'
    )
