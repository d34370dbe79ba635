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
    """The memory limit of this control group in bytes; None: it has none."""
    for folder in _folders(root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < 2**60:  # version 1 writes a huge number in place of `max`
                return int(text)
    return None


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
