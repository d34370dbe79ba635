"""A bar of parts, the largest first, with the figure of each below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.pages.html import text
from shoal.pages.svg import stacked_bar

SHADES = 6
LEAST = 0.005
"""A smaller part of the whole is not drawn."""


def parts_bar(title: str, parts: Mapping[str, float], say: Callable[[float], str]) -> str:
    """The bar of what adds to a whole. `say`: a size in words."""
    total = sum(parts.values()) or 1.0
    shown = sorted(((size, name) for name, size in parts.items() if size > LEAST * total), reverse=True)
    colored = [(f"c{number % SHADES}", name, size) for number, (size, name) in enumerate(shown)]
    bar = stacked_bar([(f"part {kind}", f"{name}: {say(size)}", size / total) for kind, name, size in colored])
    keys = "".join(
        f'<li><i class="line {kind}"></i>{text(name)} <b>{text(say(size))}</b></li>' for kind, name, size in colored
    )
    return f'<p class="note">{text(title)}, {text(say(sum(parts.values())))}</p>{bar}<ul class="keys">{keys}</ul>'
