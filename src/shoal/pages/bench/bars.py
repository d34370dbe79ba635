"""Horizontal bars with their names: ratios against a line at 1."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pages.html import text

WIDTH, NAMES, ROW = 760, 190, 30
"""Of the drawing, of the column of names, and the height of a row."""
FIGURES = 90
"""Of the column of figures at the right."""


def ratio_bars(rows: Sequence[tuple[str, float, float, float, float | None]], label: str) -> str:
    """A bar for each row: its name, ratio, the range of the ratio, and the predicted ratio as a mark."""
    most = max([1.2, *(high for _, _, _, high, _ in rows), *(mark for *_, mark in rows if mark is not None)])
    scale = (WIDTH - NAMES - FIGURES) / most
    drawn = []
    for number, (name, ratio, low, high, mark) in enumerate(rows):
        y = number * ROW + 4
        title = f"{name}: {ratio:.2f} ({low:.2f} to {high:.2f})"
        drawn.append(
            f'<g><title>{text(title)}</title><text x="0" y="{y + 15}">{text(name, 28)}</text>'
            f'<rect class="measured" x="{NAMES}" y="{y}" width="{ratio * scale:.1f}" height="20" rx="4"/>'
            f'<path class="ends" d="M{NAMES + low * scale:.1f} {y + 10}H{NAMES + high * scale:.1f}"/>'
            f'<text x="{WIDTH}" y="{y + 15}" text-anchor="end">{ratio:.2f}</text></g>'
        )
        if mark is not None:
            drawn.append(f'<path class="mark" d="M{NAMES + mark * scale:.1f} {y - 3}v26"/>')
    line = f'<path class="one" d="M{NAMES + scale:.1f} 0V{len(rows) * ROW}"/>'
    return _svg(len(rows), label, "".join(drawn) + line)


def _svg(count: int, label: str, drawn: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {count * ROW + 6}" role="img"'
    return f'<div class="wide"><svg class="plot bars" {box}><title>{text(label)}</title>{drawn}</svg></div>'
