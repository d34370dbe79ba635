"""Find out whether all hosts see the same files before a run relies on it.

A run that loses the host of rank 0 continues from its checkpoints on another host. If each host has its own directory
under that name, there are none, and the run would start over. So the first host writes a file with a random name, and
every other host looks for it. The file lies in the nearest directory above the checkpoints that exists.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from shoal.launch.hosts.messages import Message

SECONDS = 10.0
"""Seconds in which a host has to see the file. A network file system may remember for some that it was not there."""
LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems of one machine, which show a file at once or never."""
ORDERS = ("write token", "find token", "remove token")


def handle(order: Message) -> Message:
    """Write, find or remove the file of an order; returns the report."""
    if order["do"] == "write token":
        return {"say": "token written", "folder": _write(Path(order["folder"]), str(order["token"]))}
    path = Path(order["folder"]) / str(order["token"])
    if order["do"] == "find token":
        return {"say": "token found", "is_found": _appears(path), "cwd": os.getcwd()}
    path.unlink(missing_ok=True)
    return {"say": "token removed"}


def _write(folder: Path, token: str) -> str:
    """Write the file, and return its folder; empty: this host cannot write there, which the run itself reports."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        (folder / token).touch(mode=0o600)
    except OSError:
        return ""
    return str(folder)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + (0.0 if _is_local(path.parent) else SECONDS)
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system look again
        time.sleep(0.1)
    return True


def _is_local(folder: Path) -> bool:
    """Whether a folder is on a file system of this machine alone."""
    found, kind = "", ""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    for _, where, of_kind, *_ in mounts:
        if folder.absolute().is_relative_to(where) and len(where) >= len(found):  # the later of two hides the other
            found, kind = where, of_kind
    return kind in LOCAL
