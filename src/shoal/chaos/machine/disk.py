"""The disk of the checkpoints: it can be full, and its bytes can change."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory for checkpoints."""

    path: Path
    is_mounted: bool
    """Whether it is a file system of its own, in memory."""

    @property
    def checkpoints(self) -> Path:
        """The value of `checkpoint.dir`."""
        return self.path / "checkpoints"

    def fill(self) -> None:
        """Leave no space: the file system becomes as small as what it holds."""
        state = os.statvfs(self.path)
        _remount(self.path, max(1, (state.f_blocks - state.f_bfree)) * state.f_frsize)

    def empty(self) -> None:
        """Give the space back."""
        _remount(self.path, None)

    def committed(self) -> int:
        """The newest step that `latest` names; -1: there is none."""
        try:
            return int((self.checkpoints / _LATEST).read_text().split("-")[1])
        except (OSError, IndexError, ValueError):
            return -1

    def flip_byte(self, seed: int) -> int | None:
        """Change one byte of the newest step's tensors; return that step, or None if there is none."""
        step = self.committed()
        shards = sorted((self.checkpoints / f"step-{step:08d}").glob("*.safetensors"))
        if not shards:
            return None
        rng = random.Random(seed)
        shard = rng.choice(shards)
        try:
            with shard.open("r+b") as file:
                place = rng.randrange(file.seek(0, os.SEEK_END))
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        except FileNotFoundError:  # a newer step has taken its place
            return None
        return step


@contextmanager
def disk(path: Path, *, mount: bool) -> Iterator[Disk]:
    """A directory; `mount`: as a file system of its own, where that is allowed."""
    path.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=50%,mode=700", "tmpfs", str(path)]
    is_mounted = mount and subprocess.run(words, check=False, capture_output=True).returncode == 0
    try:
        yield Disk(path, is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def can_mount() -> bool:
    """Whether this process may mount a file system in memory."""
    with tempfile.TemporaryDirectory() as folder, disk(Path(folder) / "disk", mount=True) as tried:
        return tried.is_mounted


def _remount(path: Path, size: int | None) -> None:
    given = "50%" if size is None else str(size)
    subprocess.run(["mount", "-o", f"remount,size={given}", str(path)], check=False, capture_output=True)
