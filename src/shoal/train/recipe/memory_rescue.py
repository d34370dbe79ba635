"""The folders in a memory file system that hold the state of runs, and what is saved to a disk from one of them.

Every user of the machine can write to /dev/shm, under any name. So a folder is used only if it is this user's own and
private (`shoal.files.PrivateFolder`), everything is read relative to its descriptor, and nothing is copied that does
not have the hash that its manifest says. Where to copy it, the run says; a folder never does.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal.checkpoint.formats.safetensors import new_file
from shoal.checkpoint.storage.manifest import CHUNK, MOST_BYTES, NAME, File, Manifest
from shoal.checkpoint.storage.store import STEP, Store
from shoal.errors import ShoalError
from shoal.files import PrivateFolder, shared_folder

DISK = "disk"
"""A file beside the steps in memory that names the place where the run saves."""
_MOST_PATH = 4096

Say = Callable[[str], None]


def place_of(where: str) -> str:
    """The place where a run saves, in a form that can be compared: a URL, or an absolute path."""
    return where if "://" in where else os.path.abspath(where)


@contextmanager
def memory_folder(where: str) -> Iterator[int]:
    """A descriptor of the directory that holds the folders of all runs; `ShoalError` if it cannot be used."""
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(shared_folder(Path(where)))
        except OSError as error:
            raise cannot_hold(where, error) from None
        yield handle


def cannot_hold(where: str, error: OSError) -> ShoalError:
    """For a directory that is no place for the state of a run."""
    return ShoalError(
        f"{where!r} cannot hold the state of this run: {error.strerror or error}",
        fix="--checkpoint.memory_dir of a memory file system, or --checkpoint.memory_every 0step",
    )


def private_folders(parent: int, prefix: str) -> Iterator[tuple[str, PrivateFolder | OSError]]:
    """Everything in a directory whose name begins so: the folder, opened, or the reason why it is not used."""
    for name in sorted(os.listdir(parent)):
        if not name.startswith(prefix):
            continue
        try:
            folder = PrivateFolder(name, parent=parent)
        except OSError as error:
            if os.access(name, os.F_OK, dir_fd=parent, follow_symlinks=False):  # else it was removed just now
                yield name, error
            continue
        with folder:
            yield name, folder


def own_folder(where: str, prefix: str, say: Say) -> Path:
    """The folder whose name begins so and that is private to this user; a new one with an unpredictable name, if there
    is none."""
    ignored: dict[str, OSError] = {}
    with memory_folder(where) as parent:
        for name, found in private_folders(parent, prefix):
            if isinstance(found, PrivateFolder):
                return Path(where) / name
            ignored[name] = found
    say_ignored(where, ignored, say)
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=where))
    except OSError as error:
        raise cannot_hold(where, error) from None


def say_ignored(where: str, ignored: Mapping[str, OSError], say: Say) -> None:
    """One line for all folders that have the name of one of ours and are not used."""
    if ignored:
        name, error = next(iter(ignored.items()))
        more = f", and {len(ignored) - 1} more" if len(ignored) > 1 else ""
        say(f"ignored {os.path.join(where, name)!r}{more}: not a private folder of this user ({error.strerror})")


def newest_in(folder: PrivateFolder) -> tuple[int, str] | None:
    """The newest step in a folder, and the name of its own folder; None: there is none. `OSError` if something in there
    has the name of a step and is not this user's."""
    found: list[tuple[int, int, str]] = []
    for name in folder.names():
        if match := STEP.fullmatch(name):
            try:
                with folder.folder(name) as step:
                    os.close(step.open(NAME))
            except FileNotFoundError:  # it was never finished
                continue
            found.append((int(match[1]), int(match[2] or 1), name))
    return (max(found)[0], max(found)[2]) if found else None


def recorded_place(folder: PrivateFolder) -> str:
    """The place where the run of a folder saves; empty: it does not say."""
    try:
        return folder.read(DISK, _MOST_PATH).decode()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def rescue(folder: PrivateFolder, disk: Store) -> int | None:
    """Copy the newest step in memory to a disk, if that has none as new; returns the step. Chunks that do not have
    their hash are not copied, and then nothing is: `ShoalError`."""
    newest = newest_in(folder)
    if newest is None or newest[0] <= max(disk.steps(), default=-1):
        return None
    step, name = newest
    with ExitStack() as stack:
        source = stack.enter_context(folder.folder(name))
        manifest = Manifest.parse(source.read(NAME, MOST_BYTES))
        if manifest.step != step:
            raise ShoalError(f"{name} says that it is of step {manifest.step}", fix="remove it: it is damaged")
        files = {name: stack.enter_context(os.fdopen(source.open(name), "rb")) for name in manifest.files}
        for name, file in manifest.files.items():
            if (size := os.fstat(files[name].fileno()).st_size) != file.size:
                raise ShoalError(f"{name} has {size:,} bytes, and the manifest says {file.size:,}", fix="remove it")
        draft = disk.begin(step)
        try:
            for name, file in manifest.files.items():
                with new_file(draft / name, disk.disk) as out:
                    for chunk in _checked(files[name].read, name, file):
                        disk.disk.write(out, chunk)
        except BaseException:
            disk.abandon(step)
            raise
    disk.commit(manifest, lambda unfinished: None)  # the step is there
    return step


def _checked(read: Callable[[int], bytes], name: str, file: File) -> Iterator[bytes]:
    """The chunks of a file, each of which has its hash."""
    for number, wanted in enumerate(file.hashes):
        chunk = read(CHUNK)
        if hashlib.sha256(chunk).hexdigest() != wanted:
            raise ShoalError(f"chunk {number} of {name} does not have the hash that its manifest says", fix="remove it")
        yield chunk
