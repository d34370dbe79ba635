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


def large(value: Any) -> str:
    """A large number with a unit: 1.23 M."""
    found = number(value)
    if not math.isfinite(found):
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(found) >= size:
            return f"{found / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{found:,.0f}"


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
    if 0 < found < 1e-3:
        return f"{found * 1e6:.3g} µs"
    if found < 1:
        return f"{found * 1e3:.3g} ms"
    if found < 60:
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
