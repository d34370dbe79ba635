"""Tests that run beside each other in several processes, and those that have the machine for themselves.

A test that measures time needs the cores that it measures. It is marked `alone`: no other test runs while it does. Any
number of the others run at the same time. Two locks on files, which the processes of one run share, hold them apart:

    gate     held for a moment by every test that begins, and by one that is to be alone for as long as it waits;
             so nobody else begins, and it is its turn as soon as those that run have ended
    machine  shared by the others, and exclusive to one that is alone
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Wait until a test may run; others may follow when the block has ended."""
    with (folder / "machine").open("w") as machine:
        with (folder / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(machine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield  # a lock ends with its file
