"""The sockets that this process has open, also those of libraries that do not show theirs."""

from __future__ import annotations

import os
from contextlib import suppress

FOLDER = "/proc/self/fd"

Socket = tuple[int, str]
"""A descriptor, and the kernel's name of its socket: descriptors are used again."""


def open_sockets() -> set[Socket]:
    """All sockets of this process; none on systems without /proc."""
    found: set[Socket] = set()
    with suppress(OSError):
        for name in os.listdir(FOLDER):
            with suppress(OSError):  # the descriptor of this folder itself
                link = os.readlink(f"{FOLDER}/{name}")
                if link.startswith("socket:"):
                    found.add((int(name), link))
    return found
