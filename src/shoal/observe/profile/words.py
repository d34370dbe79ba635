"""The parts of a profile in words."""

from __future__ import annotations

WORDS = {
    "data": "waiting for data",
    "bubble": "pipeline bubble",
    "save": "saving",
    "late": "for a late rank",
    "wire": "on the wire",
    "wait": "not split",
}


def spoken(name: str) -> str:
    """A part in words.

    >>> spoken("tp.late"), spoken("forward")
    ('tp, for a late rank', 'forward')
    """
    axis, _, kind = name.rpartition(".")
    return f"{'all ranks' if axis == 'world' else axis}, {WORDS.get(kind, kind)}" if axis else WORDS.get(name, name)
