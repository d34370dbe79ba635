"""Limits and out-of-memory kills of this process's control group: in a container they count, not those of the host.

Version 2 of control groups has the kills in `memory.events`, version 1 in `memory.oom_control`. A container may see its
own group as the root of the file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.files import read_small

ROOT = Path("/sys/fs/cgroup")
PERIOD = "cpu.cfs_period_us"


def oom_kills(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Processes of this control group that the kernel has killed for lack of memory; None: it is not known."""
    for folder in _folders(root, own):
        for name in ("memory.events", "memory.oom_control"):
            found = _numbers(folder / name).get("oom_kill")
            if found is not None:
                return found
    return None


def limit(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The memory limit of this control group in bytes, or of one around it if that is less; None: there is none."""
    found = (_limit(group) for group in _around(root, own, "memory"))
    return min((size for size in found if size is not None), default=None)


def room(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> tuple[int, int] | None:
    """Bytes that new processes may use in this control group, or in one around it if that has less, and the limit of
    that group; None: there is none."""
    found = []
    for group in _around(root, own, "memory"):
        most = _limit(group)
        if most is not None:
            found.append((max(0, most - _in_use(group)), most))
    return min(found, default=None)


def _limit(group: Path) -> int | None:
    """The memory limit of a group; None: it has none, or a huge one, which version 1 writes in place of `max`."""
    found = _number(group, "memory.max", "memory.limit_in_bytes")
    return found if found is not None and found < 2**60 else None


def _in_use(group: Path) -> int:
    """Bytes that a group and those in it use, without cached files: the kernel takes them back before it kills."""
    stat = _numbers(group / "memory.stat")
    cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return (_number(group, "memory.current", "memory.usage_in_bytes") or 0) - cached


def most_processes(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The fewest processes and threads that this control group or one around it may have; None: it has no limit."""
    found = (_number(group, "pids.max") for group in _around(root, own, "pids"))
    return min((number for number in found if number is not None), default=None)


def cores(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """The number of cores, such as 1.5, whose time this control group may use, or one around it if that is less; None:
    it has no limit."""
    found = []
    for group in _around(root, own, "cpu"):
        quota = _words(group / "cpu.max") or [*_words(group / "cpu.cfs_quota_us"), *_words(group / PERIOD)]
        if len(quota) == 2 and all(word.isdecimal() for word in quota) and int(quota[1]):
            found.append(int(quota[0]) / int(quota[1]))
    return min(found, default=None)


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that has one; `max` is none."""
    words = (word for name in names for word in _words(group / name)[:1])
    return next((int(word) for word in words if word.isdecimal()), None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _around(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The folder of this group, and of each group around it: the limits of all of them count."""
    for folder in _folders(root, own, controller):
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(root))


def _folders(root: Path, own: Path, controller: str = "memory") -> list[Path]:
    """Where the files of this group may be, the most likely first."""
    try:
        lines = read_small(own).splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [root / path.lstrip("/"), root]
        elif controller in controllers.split(","):
            found += [root / controller / path.lstrip("/"), root / controller]
    return found


def _numbers(path: Path) -> dict[str, int]:
    try:
        words = [line.split() for line in read_small(path).splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
