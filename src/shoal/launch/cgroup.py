"""Limits and out-of-memory kills of this process's control group: in a container they count, not those of the host.

Version 2 of control groups has the kills in `memory.events`, version 1 in `memory.oom_control`. A container may see its
own group as the root of the file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    found = []
    for folder in _folders(root, own):
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            found += [_size(group / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((size for size in found if size is not None), default=None)


def _size(path: Path) -> int | None:
    """The number in a file; None: it has none, or a huge one, which version 1 writes in place of `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < 2**60 else None


def used(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The memory that this control group uses in bytes, caches included; None: it is not known."""
    names = ("memory.current", "memory.usage_in_bytes")
    return next((found for found in _values(root, own, "memory", names)), None)


def reclaimable(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes of cached files, which the kernel takes back before it kills; None: it is not known."""
    for folder in _folders(root, own):
        found = _numbers(folder / "memory.stat")
        for name in ("inactive_file", "total_inactive_file"):
            if name in found:
                return found[name]
    return None


def most_processes(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The number of processes and threads that this control group may have; None: it has no limit."""
    return min(_values(root, own, "pids", ("pids.max",)), default=None)


def cores(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """The number of cores whose time this control group may use, such as 1.5; None: it has no limit."""
    for folder in _folders(root, own, "cpu"):
        quota = _words(folder / "cpu.max") or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / PERIOD)]
        if len(quota) == 2 and all(word.isdecimal() for word in quota) and int(quota[1]):
            return int(quota[0]) / int(quota[1])
    return None


def _values(root: Path, own: Path, controller: str, names: tuple[str, ...]) -> Iterator[int]:
    """The numbers in the files of these names; `max` is none."""
    for folder in _folders(root, own, controller):
        for name in names:
            yield from (int(word) for word in _words(folder / name)[:1] if word.isdecimal())


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _folders(root: Path, own: Path, controller: str = "memory") -> list[Path]:
    """Where the files of this group may be, the most likely first."""
    try:
        lines = own.read_text().splitlines()
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
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
