"""Where checkpoints live: a directory of steps, of which each is there as a whole or not at all.

    checkpoints/
      step-00000100/          the files of a step: shards and manifest.json
      step-00000120/
      step-00000120-2/        saved once more; the later one counts, and the earlier one goes when it is there
      latest                  the name of the newest one; moves last
      .draft-step-00000140/   on its way; what a crash leaves of it is removed by the next save

A step is written under the name of a draft, every file of it is on the disk before its manifest, the manifest before
the rename, and the rename before `latest` moves. So whatever moment a process dies at, the newest step that is there is
one that was finished. Nothing that is finished is ever written to again.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.checkpoint.disk import Disk
from shoal.checkpoint.manifest import MOST_BYTES, NAME, Manifest
from shoal.errors import ShoalError

_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class Store:
    """The checkpoints of one run, on a disk."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root, self.disk = root, disk or Disk()

    def path(self, step: int) -> Path:
        """Of a step that is done; where it would be, if it is not."""
        return max(self._found().get(step, {1: self.root / f"step-{step:08d}"}).items())[1]

    def draft(self, step: int) -> Path:
        """Of a step that is on its way."""
        return self.root / f".draft-step-{step:08d}"

    def begin(self, step: int) -> Path:
        """Make room for a step, by one rank; drafts that were never finished go."""
        self.disk.make(self.root)
        for left in sorted(self.root.glob(".draft-*")):
            self.disk.remove(left)
        self.disk.make(self.draft(step))
        return self.draft(step)

    def commit(self, manifest: Manifest) -> Path:
        """Finish a step, by one rank, when all files of it are on the disk."""
        draft, disk = self.draft(manifest.step), self.disk
        file = disk.create(draft / NAME)
        disk.write(file, manifest.to_bytes())
        disk.close(file)
        disk.sync(draft)
        earlier = self._found().get(manifest.step, {})
        number = max(earlier, default=0) + 1
        done = self.root / f"step-{manifest.step:08d}{f'-{number}' * (number > 1)}"
        disk.rename(draft, done)
        disk.sync(self.root)
        self._point_to(done.name)
        for old in earlier.values():
            self._drop(old)
        return done

    def _point_to(self, name: str) -> None:
        new = self.root / ".draft-latest"
        file = self.disk.create(new)
        self.disk.write(file, f"{name}\n".encode())
        self.disk.close(file)
        self.disk.rename(new, self.root / "latest")
        self.disk.sync(self.root)

    def steps(self) -> list[int]:
        """Those that are done, the oldest first."""
        return sorted(self._found())

    def _found(self) -> dict[int, dict[int, Path]]:
        """Step → how often it was saved → where. Only what has a manifest is done."""
        found: dict[int, dict[int, Path]] = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = _STEP.fullmatch(path.name)
            if match and (path / NAME).is_file():
                found.setdefault(int(match[1]), {})[int(match[2] or 1)] = path
        return found

    def manifest(self, step: int) -> Manifest:
        """Of a step that is done."""
        path = self.path(step) / NAME
        try:
            with path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except OSError as error:
            known = ", ".join(map(str, self.steps()[-5:])) or "none"
            raise ShoalError(
                f"there is no checkpoint of step {step} in {self.root}: {error.strerror}",
                fix=f"steps that are: {known}",
            ) from error
        read = Manifest.parse(text)
        if read.step != step:
            raise ShoalError(f"{path} says that it is of step {read.step}", fix="load another one: this one was moved")
        return read

    def retain(self, number: int) -> list[int]:
        """Remove all but the newest ones; returns those that are gone. The newest is never removed."""
        gone = self.steps()[: -max(1, number)]
        for step in gone:
            for path in self._found()[step].values():
                self._drop(path)
        return gone

    def _drop(self, path: Path) -> None:
        """A step is never half there: first it has no name, then no files."""
        left = self.root / f".draft-gone-{path.name}"
        self.disk.rename(path, left)
        self.disk.remove(left)
