"""Numbers of heads and features that the code of a module reads: a rank of tp has its part of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from shoal.errors import ShoalError


def divide_attributes(module: Any, names: Sequence[str], degree: int) -> None:
    """Leave a module its part of some of its numbers. `config.num_heads` is divided in a copy of `module.config`, which
    other modules do not see."""
    copied: set[str] = set()
    for name in names:
        outer, _, inner = name.rpartition(".")
        if outer and outer not in copied:
            copied.add(outer)
            setattr(module, outer, copy.copy(getattr(module, outer)))
        holder, key = (getattr(module, outer), inner) if outer else (module, name)
        number = getattr(holder, key, None)
        if not isinstance(number, int) or number % degree:
            raise ShoalError(
                f"{type(module).__name__}.{name} must be a number that tp={degree} divides, got {number}",
                fix="tp=1, or a degree that divides it",
                code="M130",
            )
        setattr(holder, key, number // degree)
