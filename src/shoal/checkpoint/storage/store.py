"""A directory of checkpoints, in which each step exists completely or not at all.

    checkpoints/
      step-00000100/          the files of a step: shards and manifest.json
      step-00000120/
      step-00000120-2/        saved again; the later one counts, and then the earlier one is removed
      latest                  the name of the newest one; updated last
      aside-step-00000130/    archived: a run resumed from an earlier step; shoal never removes it
      step-00000150.damaged-1 had the name of a step and no manifest when that step was saved; shoal never removes it
      .draft-step-00000140/   in progress; the next save removes what a crash leaves of it

A step is written under the name of a draft. Every file of it is on the disk before its manifest, the manifest before
the rename, and the rename before `latest` is updated. So at any moment that a process dies, the newest step that exists
is complete. A complete step is never written to again. The same holds for a power loss: see
`shoal.observe.durable_write` for what a disk may lose then.

An object store has no rename. There the files of a step have their final names from the start, and it is a step when
its manifest exists. An object next to it, `aside-step-00000130`, marks it as archived. It has no locks either: an
object `writer` names the run that saves there, and the run that wrote it last is the only one that may.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import MOST_BYTES, NAME, Manifest
from shoal.checkpoint.storage.open_filesystem import filesystem_at
from shoal.errors import Problem, ShoalError, StoreTaken, raise_if
from shoal.url_filesystem import fix_of, reason

LATEST = "latest"
ASIDE = "aside-"
DAMAGED = ".damaged-"
DRAFT = ".draft-"
WRITER = "writer"
MOST_WRITER = 300
"""Bytes of `writer` that are read."""
STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")
"""The name of a complete step: its number, and how often it was saved."""


def root_of(path: Path) -> Path:
    """Return the directory of steps: the checkpoints of a run, or the directory itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find(where: str | Path) -> tuple[Store, int | None]:
    """Resolve a path: a directory of steps, the directory of a run that has one, or a step in one."""
    path = Path(where)
    if "://" in str(where):
        return Store.at(where), None
    if match := STEP.fullmatch(path.name):
        return Store.at(path.parent), int(match[1])
    return Store.at(root_of(path)), None


def wrong_sizes(folder: Path, manifest: Manifest, disk: Filesystem) -> Iterator[tuple[str, str]]:
    """Yield files of a step that are missing or of another size, and what is wrong; their bytes are not read."""
    for name, file in manifest.files.items():
        try:
            size = disk.size(folder / name)
        except OSError as error:
            yield name, f"cannot be read: {error.strerror or error}"
        else:
            if size != file.size:
                yield name, f"has {size:,} bytes, and the manifest lists {file.size:,}"


class Store:
    """The checkpoints of one run, on a file system."""

    def __init__(self, root: Path, disk: Filesystem | None = None, *, where: str = "") -> None:
        self.root, self.disk = root, disk or Filesystem()
        self.where = where or str(root)
        """Its path or URL, for messages."""
        self._notes: list[str] = []
        self._writer = b""
        """What this run has written to `writer`; empty: it has not claimed the store."""
        self._is_taken = False

    @classmethod
    def at(cls, where: str | Path) -> Store:
        """Open a local directory, or a URL of any store that fsspec supports."""
        disk, root = filesystem_at(where)
        return cls(root, disk, where=str(where))

    # ---- saving -----------------------------------------------------------------------------------------------------

    def claim(self, who: str) -> None:
        """Become the only run that saves in an object store. An earlier one stops before it changes anything: to
        this one, it looks the same dead and alive."""
        if not self.disk.renames:
            self._writer = who.encode()[:MOST_WRITER]
            self.disk.make(self.root)
            self.disk.put(self.root / WRITER, self._writer)

    def _reject_other_writer(self) -> None:
        if not self._writer:
            return
        try:
            found = self.disk.read(self.root / WRITER, MOST_WRITER)
        except FileNotFoundError:  # all of it was removed; no other run has claimed it
            return
        if found != self._writer:
            self._is_taken = True
            other = ascii(found.decode(errors="replace"))
            raise StoreTaken(
                f"another run saves in {self.where} now: {other}; this one stops, and has left all steps there as they"
                " are",
                fix="--checkpoint.dir ELSEWHERE for one of the two runs",
                code="C052",
            )

    def draft(self, step: int) -> Path:
        """Return the path of a step in progress."""
        self.disk.saving(step)
        if self.disk.renames:
            return self.root / f"{DRAFT}step-{step:08d}"
        return self._next(step)

    def begin(self, step: int) -> Path:
        """Create the draft of a step, on one rank, and remove unfinished drafts."""
        self.disk.saving(step, again=True)
        self._reject_other_writer()
        self.disk.make(self.root)
        for left in self._leftovers():
            self.disk.remove(left)
        self._move_damaged(step)
        draft = self.draft(step)
        self.disk.make_draft(draft)
        return draft

    def _move_damaged(self, step: int) -> None:
        """Rename whatever has a step's name and is not a step. It may be a user's file: it is not removed."""
        done = self._next(step)
        if self.disk.renames and done.name in self.disk.names(self.root):
            moved = self._free(f"{done.name}{DAMAGED}1", f"{done.name}{DAMAGED}")
            self.disk.rename(done, moved)
            self._notes.append(f"{done} has no readable {NAME}; it was renamed to {moved.name}")

    def take_notes(self) -> list[str]:
        """Return messages for the user about saves since the last call."""
        taken, self._notes = self._notes, []
        return taken + self.disk.take_notes(self.where)

    def commit(self, manifest: Manifest, unfinished: Callable[[str], None] | None = None) -> Path:
        """Commit a step, on one rank, when all its files are on the disk. On failure the draft is removed if possible.

        A step exists when it has its final name. An error after that is reported to `unfinished`, if given.
        """
        self._reject_other_writer()
        draft, disk = self.draft(manifest.step), self.disk
        earlier = self._found().get(manifest.step, {})
        done = self._next(manifest.step)
        try:
            self.disk.put(draft / NAME, manifest.to_bytes())
            disk.sync(draft)
            if draft != done:
                disk.rename(draft, done)
        except OSError:
            self.abandon(manifest.step)
            raise
        try:
            what = f"but the disk has not confirmed the name {done.name}, which a power failure may undo"
            disk.sync(self.root)
            what = f"but `{LATEST}` could not be updated, and may name an earlier one; loading finds the newest"
            self._point_to(done.name)
            what = "but an earlier save of the same step could not be removed"
            self._drop(*earlier.values())
        except Exception as error:  # each store raises its own kind
            if unfinished is None:
                raise
            unfinished(f"step {manifest.step} is saved in {self.where}, {what}: {reason(error)}")
        return done

    def abandon(self, step: int) -> None:
        """Remove what exists of a step that will not be finished, as far as possible."""
        if self._is_taken:  # the draft may be that of the other run
            return
        with suppress(Exception):  # each store raises its own kind
            self.disk.remove(self.draft(step))

    def _next(self, step: int) -> Path:
        """Return the name of the next save of a step."""
        number = max(self._named().get(step, {}), default=0) + 1
        return self.root / f"step-{step:08d}{f'-{number}' * (number > 1)}"

    def _leftovers(self) -> list[Path]:
        """Return drafts of saves that have ended."""
        names = self.disk.names(self.root)
        left = [name for name in names if name.startswith(DRAFT)]
        if not self.disk.renames:
            left += [name for name in names if STEP.fullmatch(name) and not self.disk.has(self.root / name / NAME)]
        return [self.root / name for name in left]

    def _point_to(self, name: str) -> None:
        text = f"{name}\n".encode()
        if not self.disk.renames:
            self.disk.put(self.root / LATEST, text)
            return
        new = self.root / f"{DRAFT}{LATEST}"
        self.disk.put(new, text)
        self.disk.rename(new, self.root / LATEST)
        self.disk.sync(self.root)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Return the path of a complete step, or its path if it were saved now."""
        return max(self._found().get(step, {1: self.root / f"step-{step:08d}"}).items())[1]

    def steps(self) -> list[int]:
        """Return the complete steps, the oldest first."""
        return sorted(self._found())

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a complete step."""
        path = self.path(step) / NAME
        try:
            text = self.disk.read(path, MOST_BYTES + 1)
        except OSError as error:
            known = ", ".join(map(str, self.steps()[-5:])) or "none"
            raise ShoalError(
                f"there is no checkpoint of step {step} in {self.where}: {error.strerror or error}",
                fix=f"--resume STEP, with one of the saved steps: {known}",
                code="C002",
            ) from error
        try:
            read = Manifest.parse(text)
        except ShoalError as error:
            raise ShoalError(*(problem.within(path.parent.name) for problem in error.problems)) from error
        if read.step != step:
            raise ShoalError(
                f"{path} is the manifest of step {read.step}: it was moved",
                fix="--resume STEP, another one",
                code="C007",
            )
        return read

    def latest_valid(self, steps: Iterable[int] | None = None) -> tuple[int | None, dict[int, str]]:
        """Return the newest of some steps (None: of all) with a readable manifest and files of the listed sizes, and
        what is wrong with each newer one. Their bytes are not read."""
        wrong: dict[int, str] = {}
        for step in sorted(self.steps() if steps is None else steps, reverse=True):
            try:
                self._check_sizes(step)
            except ShoalError as error:
                wrong[step] = str(error)
            else:
                return step, wrong
        return None, wrong

    def _check_sizes(self, step: int) -> None:
        folder = self.path(step)
        found = wrong_sizes(folder, self.manifest(step), self.disk)
        raise_if(
            Problem("C008", f"{folder.name}/{name} {what}", "--resume STEP, with another step") for name, what in found
        )

    def damaged(self) -> list[str]:
        """Return names of steps without a manifest. In an object store, those are saves in progress."""
        names = [name for name in self.disk.names(self.root) if STEP.fullmatch(name)] if self.disk.renames else []
        return [name for name in names if not self.disk.has(self.root / name / NAME)]

    def _named(self) -> dict[int, dict[int, Path]]:
        """Map step → number of the save → path. Only steps with a manifest are complete."""
        found: dict[int, dict[int, Path]] = {}
        for name in self.disk.names(self.root):
            match = STEP.fullmatch(name)
            if match and self.disk.has(self.root / name / NAME):
                found.setdefault(int(match[1]), {})[int(match[2] or 1)] = self.root / name
        return found

    def _found(self) -> dict[int, dict[int, Path]]:
        """Return the steps that are not archived."""
        if self.disk.renames:
            return self._named()
        aside = {name.removeprefix(ASIDE) for name in self.disk.names(self.root) if name.startswith(ASIDE)}
        kept = {
            step: {number: path for number, path in saved.items() if path.name not in aside}
            for step, saved in self._named().items()
        }
        return {step: saved for step, saved in kept.items() if saved}

    # ---- space ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the steps cannot be listed, such as with wrong credentials for an object store."""
        try:
            self.disk.names(self.root)
        except OSError as error:
            fix = fix_of(self.where, error) or "--checkpoint.dir ELSEWHERE"
            raise ShoalError(f"{self.where} cannot be read: {reason(error)}", fix=fix, code="C050") from error

    def room(self, num_bytes: int) -> None:
        """Raise if `num_bytes` do not fit here, or if nothing can be written here at all."""
        try:
            self.disk.probe(self.root)
        except OSError as error:
            fix = fix_of(self.where, error) or "--checkpoint.dir ELSEWHERE"
            raise ShoalError(f"{self.where} cannot be written to: {reason(error)}", fix=fix, code="C009") from error
        free = self.disk.free(self.root)
        if free is not None and free < num_bytes:
            raise ShoalError(
                f"{self.where} has {free / 2**30:.2f} GiB free, and a checkpoint needs {num_bytes / 2**30:.2f} GiB",
                fix="--checkpoint.dir ELSEWHERE, or free disk space",
                code="C010",
            )

    def retain(self, number: int) -> list[int]:
        """Remove all but the newest steps; return the removed ones. The newest is never removed, nor is the newest
        valid one."""
        self._reject_other_writer()
        steps = self.steps()
        gone, kept = steps[: -max(1, number)], steps[-max(1, number) :]
        if gone and self.latest_valid(kept)[0] is None:
            last = self.latest_valid(gone)[0]
            gone = [step for step in gone if step != last]
        found = self._found()
        self._drop(*(path for step in gone for path in found.get(step, {}).values()))
        return gone

    def drop(self, *, after: int) -> None:
        """Remove the steps after one, in a temporary store."""
        self._drop(*(path for step, saves in self._found().items() if step > after for path in saves.values()))

    def archive(self, *, after: int) -> list[int]:
        """Rename the steps after one, from which a run resumes, and remove none; return them."""
        found = self._found()
        later = sorted(step for step in found if step > after)
        if not later:
            return []
        if earlier := [step for step in found if step <= after]:
            self._point_to(self.path(max(earlier)).name)
        else:
            self.disk.remove(self.root / LATEST)
            self.disk.sync(self.root)  # else a power loss may leave a `latest` that names no step
        for path in (path for step in later for path in found[step].values()):
            if self.disk.renames:
                self.disk.rename(path, self._free(f"{ASIDE}{path.name}"))
            else:
                self.disk.put(self.root / f"{ASIDE}{path.name}", f"{path.name}\n".encode())
        self.disk.sync(self.root)
        return later

    def _free(self, name: str, stem: str = "") -> Path:
        """Return an unused name: this one, or a stem (by default itself and a dot) with a number from 2 on."""
        taken = set(self.disk.names(self.root))
        names = itertools.chain([name], (f"{stem or f'{name}.'}{number}" for number in itertools.count(2)))
        return self.root / next(one for one in names if one not in taken)

    def _drop(self, *paths: Path) -> None:
        """Remove steps so that none is ever incomplete: first the name, then the files, also across a power loss."""
        if self.disk.renames:
            gone = [self.root / f"{DRAFT}gone-{path.name}" for path in paths]
            for path, left in zip(paths, gone, strict=True):
                self.disk.rename(path, left)
            if gone:
                self.disk.sync(self.root)
            for left in gone:
                self.disk.remove(left)
        else:
            for path in paths:
                self.disk.remove(path / NAME)
                self.disk.remove(path)
