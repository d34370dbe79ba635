"""Figures in words: short, with their unit."""

from __future__ import annotations

import math
from typing import Any

from shoal.pages.run.metrics_table import number


def figure(value: Any, digits: int = 4) -> str:
    """A number with a few digits; a dash if there is none.

    >>> figure(0.000312345), figure(9991.4), figure(12345.678), figure(None), figure("nan")
    ('0.0003123', '9,991', '12,346', '–', '–')
    """
    found = number(value)
    if not math.isfinite(found):
        return "∞" if found == math.inf else "–"
    if found == 0 or 1e-4 <= abs(found) < 10 ** (digits - 1):
        return f"{found:.{digits}g}"
    return f"{found:,.0f}" if 10 ** (digits - 1) <= abs(found) < 1e15 else f"{found:.{digits - 1}g}"


ROUNDED = 0.9995
"""Of a unit: a number from here on is that unit, with three digits."""


def loss_figure(value: float | None) -> str:
    """A loss; one that is not finite says so. None: it is not known.

    >>> loss_figure(2.13456), loss_figure(math.nan), loss_figure(math.inf), loss_figure(None)
    ('2.135', 'NaN', '∞', '–')
    """
    return "NaN" if value is not None and math.isnan(value) else figure(value)


def large(value: Any) -> str:
    """A large number with a unit.

    >>> large(9_991), large(12_345), large(999_700)
    ('9,991', '12.3 k', '1 M')
    """
    found = number(value)
    if not math.isfinite(found):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(found) >= ROUNDED * size:
            part = found / size
            return f"{part:.3g} {unit}" if abs(part) < 1e3 * ROUNDED else f"{part:,.0f} {unit}"
    return f"{found / 1e3:.3g} k" if abs(found) >= 1e4 else f"{found:,.0f}"


def percent(value: Any) -> str:
    """A fraction in percent.

    >>> percent(0.1234), percent(0.004)
    ('12 %', '0.4 %')
    """
    found = 100 * number(value)
    if not math.isfinite(found):
        return "–"
    return f"{found:.0f} %" if found >= 10 or found == 0 else f"{found:.1f} %"


def duration(value: Any) -> str:
    """Seconds in the unit that fits.

    >>> duration(2.14e-5), duration(0.0213), duration(75), duration(7300), duration(200_000)
    ('21.4 µs', '21.3 ms', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    found = number(value)
    if not 0 <= found < 1e12:
        return "–"
    if 0 < found < 1e-3 * ROUNDED:
        return f"{found * 1e6:.3g} µs"
    if found < ROUNDED:
        return f"{found * 1e3:.3g} ms"
    if found < 59.95:
        return f"{found:.3g} s"
    whole = round(found)
    for size, unit, part, of in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {of}"
    return f"{whole} s"


def memory_size(size: float, whole: float) -> str:
    """Bytes in the unit that suits the whole of which they are a part.

    >>> memory_size(2**29, 2**33), memory_size(2**21, 2**28)
    ('0.5 GiB', '2.0 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if whole >= 2**30 else f"{size / 2**20:.1f} MiB"


def printable(words: str) -> str:
    """A text without control characters: they must not reach a terminal.

    >>> printable("a\\x1b[2Jb\\nc")
    'a\ufffd[2Jb\ufffdc'
    """
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)


def times(many: Any, thing: str) -> str:
    """A count with its noun."""
    found = number(many)
    return f"{found:,.0f} {thing}{'' if found == 1 else 's'}" if math.isfinite(found) else f"– {thing}s"
