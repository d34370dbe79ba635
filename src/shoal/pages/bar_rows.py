"""Rows with a bar each, in one table: the names and figures stay text of the page, and so readable on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.pages.html import text
from shoal.pages.svg import stacked_bar

SHADES = 6


@dataclass(frozen=True)
class BarRow:
    """A name, the sizes of the parts of its bar, and its figures."""

    name: str
    sizes: Sequence[float]
    """One for each kind of part."""
    figures: Sequence[str] = ()


def bar_rows(head: Sequence[str], kinds: Sequence[str], rows: Sequence[BarRow]) -> str:
    """The table. The longest bar fills its cell. `head`: above the names, the bars and each figure; `kinds`: the names
    of parts, with a key if there are several."""
    longest = max((sum(row.sizes) for row in rows), default=0.0)
    if longest <= 0:
        return ""
    heads = "".join(f"<th>{text(name)}</th>" for name in head)
    lines = "".join(_line(row, kinds, longest) for row in rows)
    keys = "".join(f'<li><i class="line c{place % SHADES}"></i>{text(kind)}</li>' for place, kind in enumerate(kinds))
    keys = f'<ul class="keys">{keys}</ul>' if len(kinds) > 1 else ""
    drawn = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="wide"><table class="rows">{drawn}</table></div>{keys}'


def _line(row: BarRow, kinds: Sequence[str], longest: float) -> str:
    parts = [
        (f"part c{place % SHADES}", f"{row.name}: {kind}, {size / (sum(row.sizes) or 1):.0%}", size / longest)
        for place, (kind, size) in enumerate(zip(kinds, row.sizes, strict=True))
    ]
    figures = "".join(f"<td>{text(each)}</td>" for each in row.figures)
    return f"<tr><td>{text(row.name, 60)}</td><td>{stacked_bar(parts)}</td>{figures}</tr>"
