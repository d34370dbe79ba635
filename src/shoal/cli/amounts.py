"""Amounts as people write them on a command line: sizes and counts with a unit."""

from __future__ import annotations

import re

from shoal.errors import ShoalError

SIZES = {"": 2.0**30, "b": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40, "mb": 1e6, "gb": 1e9}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def size_in_bytes(text: str) -> float:
    """A size; without a unit, in GiB.

    >>> size_in_bytes("70GiB") == size_in_bytes("70") == 70 * 2**30
    True
    """
    return _number(text, SIZES, "70GiB")


def count_of(text: str) -> float:
    """A number of tokens.

    >>> count_of("15T")
    15000000000000.0
    """
    return _number(text, COUNTS, "15T")


def _number(text: str, units: dict[str, float], such_as: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in units:
        raise ShoalError(f"{text!r} is not an amount", fix=f"a number and a unit, such as {such_as}")
    return float(match[1]) * units[match[2]]
