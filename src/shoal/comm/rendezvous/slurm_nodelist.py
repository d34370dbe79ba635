"""Expand Slurm's short forms of hosts (`n[01-03,7]`) and of tasks per host (`4(x2),3`).

`scontrol show hostnames` would do the first, but it is a subprocess per rank and absent from most containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


def expand_hosts(text: str) -> list[str]:
    """Return all hosts of a node list, in order.

    >>> expand_hosts("n[01-03,7]")
    ['n01', 'n02', 'n03', 'n7']
    >>> expand_hosts("a1,b[2-3]x")
    ['a1', 'b2x', 'b3x']
    >>> expand_hosts("rack[1-2]n[0-1]")
    ['rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    """
    return [host for part in _split_outside_brackets(text) for host in _expand_part(part)]


def expand_counts(text: str) -> list[int]:
    """Return the tasks of every node, in order.

    >>> expand_counts("4(x2),3")
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"a count must be such as 4 or 4(x2), got {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text.strip():
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            raise ValueError("its brackets do not match")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth or not all(parts):
        raise ValueError("its brackets do not match" if depth else "a host between two commas is empty")
    return parts


def _expand_part(part: str) -> Iterator[str]:
    """Yield the hosts of one part: expand the first bracket, and recurse for the rest."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        yield part
        return
    before, numbers, after = match.groups()
    for number in _expand_numbers(numbers):
        for rest in _expand_part(after):
            yield before + number + rest


def _expand_numbers(text: str) -> Iterator[str]:
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if match is None:
            raise ValueError(f"brackets must hold numbers and ranges such as [01-03,7], got [{text}]")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))  # 08-11 keeps its leading zeros
