"""Out-of-memory kills of this process's control group: in a container its limit counts, not the memory of the host.

Version 2 of control groups has the count in `memory.events`, version 1 in `memory.oom_control`. A container may see its
own group as the root of the file system.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


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


def _folders(root: Path, own: Path) -> list[Path]:
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
        elif "memory" in controllers.split(","):
            found += [root / "memory" / path.lstrip("/"), root / "memory"]
    return found


def _numbers(path: Path) -> dict[str, int]:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
