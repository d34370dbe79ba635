"""Find the checkpoints at a path or URL: the directory of a run, a store of steps, or one step. Nothing here imports
torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
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
    disk: Filesystem = field(default_factory=Filesystem, compare=False, repr=False)

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


def find(where: str | Path, step: int | None = None) -> SavedStep:
    """Return the step at a path or URL: itself, the requested one of those in it, or the newest of them."""
    if is_url(where):
        store, there = _at_url(str(where))
        number = _chosen(there, step, where)
        return SavedStep(there[number], store.manifest(number), store.disk)
    folder = folder_of(Path(where), step)
    return SavedStep(folder, read_manifest(folder))


def find_all(where: str | Path) -> dict[Path, Callable[[], SavedStep]]:
    """Map the folder of each step at a path or URL, the oldest first, to what reads its manifest, if that can be."""
    if is_url(where):
        return {path: partial(find, where, number) for number, path in _at_url(str(where))[1].items()}
    return {folder: partial(find, folder) for folder in folders_of(Path(where))}


def folder_at(where: str | Path, step: int | None = None) -> Path:
    """Return the folder of the step at a path or URL, whatever its content is."""
    if not is_url(where):
        return folder_of(Path(where), step)
    there = _at_url(str(where))[1]
    return there[_chosen(there, step, where)]


def is_url(where: str | Path) -> bool:
    """Whether a place is a URL, and not on this machine's disks."""
    return "://" in str(where)


def _at_url(where: str) -> tuple[Store, dict[int, Path]]:
    """The store at a URL, and its steps; one of them, if the URL names it."""
    parent, _, name = where.rstrip("/").rpartition("/")
    is_step = STEP.fullmatch(name) is not None
    store = Store.at(parent if is_step else where)
    store.check()
    steps = {number: store.path(number) for number in store.steps()}
    found = {number: path for number, path in steps.items() if not is_step or path.name == name}
    if not found:
        raise _nothing_in(where)
    return store, found


def _chosen(there: Collection[int], step: int | None, where: str | Path) -> int:
    """The requested step of those that are there, or the newest."""
    if step is None or step in there:
        return max(there) if step is None else step
    raise ShoalError(
        f"there is no checkpoint of step {step} in {where}",
        fix=f"--step {max(there)}; saved steps are {', '.join(map(str, there))}",
        code="C002",
    )


def folder_of(path: Path, step: int | None = None) -> Path:
    """Return the folder of that step, whatever its content is."""
    folders = folders_of(path)
    if step is None:
        return folders[-1]
    there = {read_manifest(path).step: path} if (path / NAME).is_file() else _done(path)
    return there[_chosen(there, step, path)]


def folders_of(path: Path) -> list[Path]:
    """Return the folders of all steps at a path, the oldest first."""
    _reject_non_directory(path)
    return [path] if (path / NAME).is_file() else list(_done(path).values())


def listing(where: str | Path) -> list[Listed]:
    """Return all checkpoints at a path or URL: steps by their number, then drafts."""
    if is_url(where):
        return _listing_at_url(str(where))
    path = Path(where)
    _reject_non_directory(path)
    if (path / NAME).is_file():
        return [_listed(path, "")]
    root = root_of(path)
    latest = _text(root / LATEST).strip()
    found = [_listed(folder, latest) for folder in _candidates(root)]
    if not found:
        raise _nothing_in(path)
    return found


def _listing_at_url(where: str) -> list[Listed]:
    """Complete steps alone: in an object store, a step without a manifest is a save in progress or its remains."""
    store, there = _at_url(where)
    latest = (
        store.disk.read(store.root / LATEST, MOST_NAME).decode().strip() if store.disk.has(store.root / LATEST) else ""
    )
    found = []
    for number, path in there.items():
        is_latest, when = path.name == latest, store.disk.modified(path / NAME)
        try:
            step = SavedStep(path, store.manifest(number), store.disk)
        except ShoalError as error:
            found.append(Listed(path, None, f"damaged: {error.problems[0].what}", is_latest, when))
        else:
            found.append(Listed(path, step, _trouble(step), is_latest, when))
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
    return next((f"damaged: {name} {what}" for name, what in wrong_sizes(step.path, step.manifest, step.disk)), "")


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


def _nothing_in(path: str | Path) -> ShoalError:
    tag = "" if "://" in str(path) else _text(Path(path) / "latest").strip()
    if re.fullmatch(r"[\w.-]+", tag) and (Path(path) / tag / NAME).is_file():  # as an engine of DeepSpeed saves
        what = f"there is no checkpoint in {path}, but in the folder {tag}, which latest names"
        return ShoalError(what, fix=str(Path(path) / tag), code="C001")
    return ShoalError(
        f"there is no checkpoint in {path}",
        fix="shoal checkpoint ls RUN_DIRECTORY, which has the folder checkpoints",
        code="C001",
    )
