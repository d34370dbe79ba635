"""Parse sizes and counts with a unit, such as 70GiB or 15T."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite

from shoal.errors import ShoalError

SIZES = {"": 2.0**30, "b": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40, "mb": 1e6, "gb": 1e9}
POWERS = {"": 1, "b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
"""Sizes of messages are powers of two, also with the units KB, MB and GB."""
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def size_in_bytes(text: str) -> float:
    """Parse a size to bytes; without a unit it is in GiB.

    >>> size_in_bytes("70GiB") == size_in_bytes("70") == 70 * 2**30
    True
    """
    return _number(text, SIZES, "70GiB")


def count_of(text: str) -> float:
    """Parse a number of tokens.

    >>> count_of("15T")
    15000000000000.0
    """
    return _number(text, COUNTS, "15T")


def sizes_between(text: str) -> list[int]:
    """Parse sizes of messages: one, or a range in which each is four times the one before.

    >>> sizes_between("1KB..64KB")
    [1024, 4096, 16384, 65536]
    """
    low, dots, high = text.partition("..")
    first = int(_number(low, POWERS, "64KB, or 1KB..256MB"))
    last = int(_number(high, POWERS, "1KB..256MB")) if dots else first
    if not 4 <= first <= last:
        what = f"sizes must be at least 4 bytes, the smaller one first, got {text!r}"
        raise ShoalError(what, fix="--sizes 1KB..256MB", code="R017")
    sizes = [first]
    while sizes[-1] * 4 <= last:
        sizes.append(sizes[-1] * 4)
    return sizes if sizes[-1] == last else [*sizes, last]


def _number(text: str, units: Mapping[str, float], such_as: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        amount = float(match[1]) * units[match[2]] if match else inf
    except (ValueError, KeyError):
        amount = inf
    if not isfinite(amount):
        raise ShoalError(
            f"a size or count must be a number and a unit, got {text!r}", fix=f"for example {such_as}", code="R017"
        )
    return amount
