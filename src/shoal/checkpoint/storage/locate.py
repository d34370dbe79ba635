"""Find the checkpoints at a path: the directory of a run, a store of steps, or one step. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import MOST_BYTES, NAME, SIZES, Entry, Manifest
from shoal.checkpoint.storage.store import ASIDE, DAMAGED, DRAFT, LATEST, STEP, Store, root_of, wrong_sizes
from shoal.errors import ShoalError
from shoal.files import read_regular

MOST_NAME = 4096
"""Maximum bytes of a file that holds a name."""


@dataclass(frozen=True)
class SavedStep:
    """A complete step, in any store."""

    path: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files but the manifest."""
        return sum(file.size for file in self.manifest.files.values())

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors of the model."""
        return sum(prod(entry.shape) for entry in self._model())

    @property
    def model_bytes(self) -> int:
        """Bytes of all tensors of the model."""
        return sum(prod(entry.shape) * SIZES[entry.dtype] for entry in self._model())

    def _model(self) -> list[Entry]:
        return [entry for name, entry in self.manifest.tensors.items() if name.startswith("model/")]


@dataclass(frozen=True)
class Listed:
    """An entry of a store: a step, or a draft."""

    path: Path
    step: SavedStep | None
    """None: it is incomplete."""
    trouble: str = ""
    """What is wrong with it, as far as that is visible without reading its files."""
    is_latest: bool = False
    when: float = 0.0
    """Seconds since 1970."""


def find(path: Path, step: int | None = None) -> SavedStep:
    """Return the step at a path: itself, the requested one of those in it, or the newest of them."""
    folder = folder_of(path, step)
    return SavedStep(folder, read_manifest(folder))


def folder_of(path: Path, step: int | None = None) -> Path:
    """Return the folder of that step, whatever its content is."""
    folders = folders_of(path)
    if step is None:
        return folders[-1]
    there = {read_manifest(path).step: path} if (path / NAME).is_file() else _done(path)
    if step not in there:
        raise ShoalError(
            f"there is no checkpoint of step {step} in {path}",
            fix=f"--step {max(there)}; saved steps are {', '.join(map(str, there))}",
            code="C002",
        )
    return there[step]


def folders_of(path: Path) -> list[Path]:
    """Return the folders of all steps at a path, the oldest first."""
    _reject_non_directory(path)
    return [path] if (path / NAME).is_file() else list(_done(path).values())


def listing(path: Path) -> list[Listed]:
    """Return all checkpoints at a path: steps by their number, then drafts."""
    _reject_non_directory(path)
    if (path / NAME).is_file():
        return [_listed(path, "")]
    root = root_of(path)
    latest = _text(root / LATEST).strip()
    found = [_listed(folder, latest) for folder in _candidates(root)]
    if not found:
        raise _nothing_in(path)
    return found


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of one step, in a folder of any name."""
    try:
        text = read_regular(folder / NAME, MOST_BYTES)
    except OSError as error:
        raise ShoalError(
            f"{folder / NAME} cannot be read: {error.strerror}", fix="--step N, with another step", code="C005"
        ) from error
    try:
        return Manifest.parse(text)
    except ShoalError as error:
        raise ShoalError(*error.problems, title=str(folder)) from None


def _done(path: Path) -> dict[int, Path]:
    """Map steps to their folders, the oldest first; of one that was saved several times, the last one."""
    store = Store(root_of(path))
    found = {step: store.path(step) for step in store.steps()}
    if not found:
        raise _nothing_in(path)
    return found


def _candidates(root: Path) -> Iterator[Path]:
    names = sorted(entry.name for entry in root.iterdir())
    yield from (root / name for name in names if STEP.fullmatch(name))
    yield from (root / name for name in names if name.startswith("step-") and DAMAGED in name)
    yield from (root / name for name in names if name.startswith((ASIDE, DRAFT)) and (root / name).is_dir())


def _listed(folder: Path, latest: str) -> Listed:
    if folder.name.startswith(DRAFT):
        return Listed(folder, None, "a draft: not finished, or in progress", when=_when(folder))
    if not (folder / NAME).is_file():
        return Listed(folder, None, f"damaged: it has no {NAME}", when=_when(folder))
    is_latest, when = folder.name == latest, _when(folder / NAME)
    try:
        step = SavedStep(folder, read_manifest(folder))
    except ShoalError as error:
        return Listed(folder, None, f"damaged: {error.problems[0].what}", is_latest, when)
    trouble = _trouble(step) or ("set aside" if folder.name.startswith(ASIDE) else "")
    return Listed(folder, step, trouble, is_latest, when)


def _trouble(step: SavedStep) -> str:
    """Return damage that is visible without reading: a file that is missing, or of another size."""
    return next((f"damaged: {name} {what}" for name, what in wrong_sizes(step.path, step.manifest, Filesystem())), "")


def _when(path: Path) -> float:
    return path.lstat().st_mtime


def _text(path: Path) -> str:
    try:
        return read_regular(path, MOST_NAME)[:MOST_NAME].decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _reject_non_directory(path: Path) -> None:
    if path.is_file():
        raise ShoalError(
            f"a checkpoint must be a directory, got the file {path}",
            fix="the directory of a run, of its checkpoints, or of one step; shoal checkpoint import reads other files",
            code="C003",
        )
    if not path.is_dir():
        near = next((parent for parent in path.parents if parent.is_dir()), Path())
        raise ShoalError(
            f"the directory {path} does not exist",
            fix=f"ls {near}, and the directory of a run or of a step",
            code="C004",
        )


def _nothing_in(path: Path) -> ShoalError:
    return ShoalError(
        f"there is no checkpoint in {path}",
        fix="shoal checkpoint ls RUN_DIRECTORY, which has the folder checkpoints",
        code="C001",
    )
