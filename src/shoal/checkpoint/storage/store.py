"""Where checkpoints live: a directory of steps, of which each is there as a whole or not at all.

    checkpoints/
      step-00000100/          the files of a step: shards and manifest.json
      step-00000120/
      step-00000120-2/        saved once more; the later one counts, and the earlier one goes when it is there
      latest                  the name of the newest one; moves last
      aside-step-00000130/    what a run has left behind that went on from an earlier step; nobody removes it
      step-00000150.damaged-1 what had the name of a step and no manifest when that step was saved; nothing removes it
      .draft-step-00000140/   on its way; what a crash leaves of it is removed by the next save

A step is written under the name of a draft, every file of it is on the disk before its manifest, the manifest before
the rename, and the rename before `latest` moves. So whatever moment a process dies at, the newest step that is there is
one that was finished. Nothing that is finished is ever written to again. The same holds when the power is lost: see
`shoal.observe.durable_write` for what a disk may have lost then.

An object store has no rename. There the files of a step have their last names from the start, and it is a step when its
manifest is there; one is set aside by an object beside it, `aside-step-00000130`, that says so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import MOST_BYTES, NAME, Manifest
from shoal.checkpoint.storage.object_store import filesystem_at
from shoal.errors import Problem, ShoalError, raise_if

LATEST = "latest"
ASIDE = "aside-"
DAMAGED = ".damaged-"
DRAFT = ".draft-"
STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")
"""The name of a step that is done: its number, and how often it was saved."""


def root_of(path: Path) -> Path:
    """Where steps are: in the checkpoints of a run, or in the directory itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find(where: str | Path) -> tuple[Store, int | None]:
    """What a person means by a path: a directory of steps, the directory of a run that has one, or a step in one."""
    path = Path(where)
    if "://" in str(where):
        return Store.at(where), None
    if match := STEP.fullmatch(path.name):
        return Store.at(path.parent), int(match[1])
    return Store.at(root_of(path)), None


def wrong_sizes(folder: Path, manifest: Manifest, disk: Filesystem) -> Iterator[tuple[str, str]]:
    """Files of a step that are gone or of another size, and what is wrong with each; their bytes are not read."""
    for name, file in manifest.files.items():
        try:
            size = disk.size(folder / name)
        except OSError as error:
            yield name, f"cannot be read: {error.strerror or error}"
        else:
            if size != file.size:
                yield name, f"has {size:,} bytes, and the manifest says {file.size:,}"


class Store:
    """The checkpoints of one run, on a disk."""

    def __init__(self, root: Path, disk: Filesystem | None = None, *, where: str = "") -> None:
        self.root, self.disk = root, disk or Filesystem()
        self.where = where or str(root)
        """As a person names it: the path, or the URL."""
        self._notes: list[str] = []

    @classmethod
    def at(cls, where: str | Path) -> Store:
        """In a directory of this machine, or at a URL of any store that fsspec knows."""
        disk, root = filesystem_at(where)
        return cls(root, disk, where=str(where))

    # ---- saving -----------------------------------------------------------------------------------------------------

    def draft(self, step: int) -> Path:
        """Of a step that is on its way."""
        self.disk.saving(step)
        if self.disk.renames:
            return self.root / f"{DRAFT}step-{step:08d}"
        return self._next(step)

    def begin(self, step: int) -> Path:
        """Make room for a step, by one rank; drafts that were never finished go."""
        self.disk.saving(step, again=True)
        self.disk.make(self.root)
        for left in self._leftovers():
            self.disk.remove(left)
        self._move_damaged(step)
        draft = self.draft(step)
        self.disk.make_draft(draft)
        return draft

    def _move_damaged(self, step: int) -> None:
        """Rename whatever has the name that a step gets and is no step. It may be a person's: it is not removed."""
        done = self._next(step)
        if self.disk.renames and done.name in self.disk.names(self.root):
            moved = self._free(f"{done.name}{DAMAGED}1", f"{done.name}{DAMAGED}")
            self.disk.rename(done, moved)
            self._notes.append(f"{done} has no {NAME} that can be read; it was renamed to {moved.name}")

    def take_notes(self) -> list[str]:
        """What a person should know of the saves since the last call."""
        taken, self._notes = self._notes, []
        return taken

    def commit(self, manifest: Manifest, unfinished: Callable[[str], None] | None = None) -> Path:
        """Finish a step, by one rank, when all files of it are on the disk. What fails leaves no draft, if it can.

        A step is there when it has its name. An error after that is reported to `unfinished`, if it is given.
        """
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
            what = f"but `{LATEST}` could not be moved to it, and may name an earlier one; loading finds the newest"
            self._point_to(done.name)
            what = "but an earlier save of the same step could not be removed"
            self._drop(*earlier.values())
        except Exception as error:  # each store has its own
            if unfinished is None:
                raise
            why = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            unfinished(f"step {manifest.step} is saved in {self.where}, {what}: {why}")
        return done

    def abandon(self, step: int) -> None:
        """Remove what there is of a step that will not be finished, as far as that can be done."""
        with suppress(Exception):  # each store has its own
            self.disk.remove(self.draft(step))

    def _next(self, step: int) -> Path:
        """The name that a step gets when it is done."""
        number = max(self._named().get(step, {}), default=0) + 1
        return self.root / f"step-{step:08d}{f'-{number}' * (number > 1)}"

    def _leftovers(self) -> list[Path]:
        """What nobody will finish."""
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

    # ---- what is there ----------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Of a step that is done; where it would be, if it is not."""
        return max(self._found().get(step, {1: self.root / f"step-{step:08d}"}).items())[1]

    def steps(self) -> list[int]:
        """Those that are done, the oldest first."""
        return sorted(self._found())

    def manifest(self, step: int) -> Manifest:
        """Of a step that is done."""
        path = self.path(step) / NAME
        try:
            text = self.disk.read(path, MOST_BYTES + 1)
        except OSError as error:
            known = ", ".join(map(str, self.steps()[-5:])) or "none"
            raise ShoalError(
                f"there is no checkpoint of step {step} in {self.where}: {error.strerror or error}",
                fix=f"steps that are: {known}",
            ) from error
        try:
            read = Manifest.parse(text)
        except ShoalError as error:
            raise ShoalError(*(Problem(f"{path.parent.name}: {p.what}", p.fix) for p in error.problems)) from error
        if read.step != step:
            raise ShoalError(f"{path} says that it is of step {read.step}", fix="load another one: this one was moved")
        return read

    def good(self, steps: Iterable[int] | None = None) -> tuple[int | None, dict[int, str]]:
        """The newest of some steps (None: of all) with a manifest that can be read and files of the sizes that it says,
        and what is wrong with each one that is newer. What their bytes are is not looked at."""
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
        raise_if(Problem(f"{folder.name}/{name} {what}", "load another step: --resume STEP") for name, what in found)

    def damaged(self) -> list[str]:
        """Names of what should be a step and has no manifest. In an object store, those are saves on their way."""
        names = [name for name in self.disk.names(self.root) if STEP.fullmatch(name)] if self.disk.renames else []
        return [name for name in names if not self.disk.has(self.root / name / NAME)]

    def _named(self) -> dict[int, dict[int, Path]]:
        """Step → how often it was saved → where. Only what has a manifest is done."""
        found: dict[int, dict[int, Path]] = {}
        for name in self.disk.names(self.root):
            match = STEP.fullmatch(name)
            if match and self.disk.has(self.root / name / NAME):
                found.setdefault(int(match[1]), {})[int(match[2] or 1)] = self.root / name
        return found

    def _found(self) -> dict[int, dict[int, Path]]:
        """Those that nobody has set aside."""
        if self.disk.renames:
            return self._named()
        aside = {name.removeprefix(ASIDE) for name in self.disk.names(self.root) if name.startswith(ASIDE)}
        kept = {
            step: {number: path for number, path in saved.items() if path.name not in aside}
            for step, saved in self._named().items()
        }
        return {step: saved for step, saved in kept.items() if saved}

    # ---- making room ------------------------------------------------------------------------------------------------

    def room(self, num_bytes: int) -> None:
        """Raise if so many bytes have no place here, or if nothing can be written here at all."""
        try:
            self.disk.probe(self.root)
        except Exception as error:  # each store has its own
            why = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            raise ShoalError(f"{self.where} cannot be written to: {why}", fix="--checkpoint.dir ELSEWHERE") from error
        free = self.disk.free(self.root)
        if free is not None and free < num_bytes:
            raise ShoalError(
                f"{self.where} has room for {free / 2**30:.2f} GiB, and a checkpoint needs {num_bytes / 2**30:.2f} GiB",
                fix="--checkpoint.dir ELSEWHERE, or make room",
            )

    def retain(self, number: int) -> list[int]:
        """Remove all but the newest ones; returns those that are gone. The newest is never removed, nor is the newest
        one that is good."""
        steps = self.steps()
        gone, kept = steps[: -max(1, number)], steps[-max(1, number) :]
        if gone and self.good(kept)[0] is None:
            last = self.good(gone)[0]
            gone = [step for step in gone if step != last]
        found = self._found()
        self._drop(*(path for step in gone for path in found.get(step, {}).values()))
        return gone

    def drop(self, *, after: int) -> None:
        """Remove the steps after one: of a place that is kept for a while only."""
        self._drop(*(path for step, saves in self._found().items() if step > after for path in saves.values()))

    def archive(self, *, after: int) -> list[int]:
        """Take the steps after one out of the way of a run that goes on from there, and remove none; returns them."""
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
        """A name that nothing has: this one, or a stem (by default itself and a dot) with a number from 2 on."""
        taken = set(self.disk.names(self.root))
        names = itertools.chain([name], (f"{stem or f'{name}.'}{number}" for number in itertools.count(2)))
        return self.root / next(one for one in names if one not in taken)

    def _drop(self, *paths: Path) -> None:
        """A step is never half there: first it is no step, then it has no files, also after a power loss."""
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
