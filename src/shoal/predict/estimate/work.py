"""What one rank computes of one layer, as compute and communication are both predicted from it."""

from __future__ import annotations

from typing import NamedTuple

from shoal.predict.estimate.rank_share import BYTES


class Work(NamedTuple):
    """What one rank computes of one layer."""

    tp: int
    cp: int
    ep: int
    sp: bool
    samples: int
    sequence: int
    precision: str
    recompute: str
    context: str | None


def bytes_in(precision: str) -> float:
    """Of a number that layers hand on."""
    return BYTES.get(precision, 4.0)
