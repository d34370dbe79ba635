"""Folders in a memory file system that hold the state of runs, and the copy of the newest step to a disk.

Every user of the machine can write to /dev/shm, under any name. So a folder is used only if it belongs to this user and
is private (`shoal.files.PrivateFolder`). Everything is read relative to its descriptor. A chunk is copied only if it
has the hash in its manifest. The run names the place to copy to; the folder does not.
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
MEMORY_FIX = "--checkpoint.memory_dir MEMORY_FILE_SYSTEM, or --checkpoint.memory_every 0step"

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
    """The error for a directory that cannot hold memory folders."""
    return ShoalError(
        f"{where!r} cannot hold the state of this run: {error.strerror or error}", fix=MEMORY_FIX, code="C031"
    )


def private_folders(parent: int, prefix: str) -> Iterator[tuple[str, PrivateFolder | OSError]]:
    """All folders in a directory with this prefix: each opened, or the reason why it is not used."""
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
    """The folder with this prefix that is private to this user; else a new one with an unpredictable name."""
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
    """Report, in one line, all folders with our prefix that are not used."""
    if ignored:
        name, error = next(iter(ignored.items()))
        more = f", and {len(ignored) - 1} more" if len(ignored) > 1 else ""
        say(f"ignored {os.path.join(where, name)!r}{more}: not a private folder of this user ({error.strerror})")


def newest_in(folder: PrivateFolder) -> tuple[int, str] | None:
    """The newest step in a folder, and the name of its subfolder; None: there is none. `OSError` if something there has
    the name of a step and does not belong to this user."""
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
    """The place where the run of a folder saves; empty: it is not recorded."""
    try:
        return folder.read(DISK, _MOST_PATH).decode()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def flush_memory_tier(folder: PrivateFolder, disk: Store) -> int | None:
    """Copy the newest step in memory to a disk that has no step as new; returns the step. If a chunk does not have its
    hash, copy nothing and raise `ShoalError`."""
    newest = newest_in(folder)
    if newest is None or newest[0] <= max(disk.steps(), default=-1):
        return None
    step, name = newest
    with ExitStack() as stack:
        source = stack.enter_context(folder.folder(name))
        manifest = Manifest.parse(source.read(NAME, MOST_BYTES))
        if manifest.step != step:
            raise ShoalError(
                f"the manifest of {name} must be of step {step}, got {manifest.step}",
                fix=f"remove {name}, which is damaged",
                code="C007",
            )
        files = {name: stack.enter_context(os.fdopen(source.open(name), "rb")) for name in manifest.files}
        for name, file in manifest.files.items():
            if (size := os.fstat(files[name].fileno()).st_size) != file.size:
                raise ShoalError(
                    f"{name} must have {file.size:,} bytes, got {size:,}",
                    fix=f"remove {name}, which is damaged",
                    code="C008",
                )
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
    """The chunks of a file; raises at one that does not have its hash."""
    for number, expected in enumerate(file.hashes):
        chunk = read(CHUNK)
        if hashlib.sha256(chunk).hexdigest() != expected:
            raise ShoalError(
                f"chunk {number} of {name} does not have the hash in its manifest",
                fix=f"remove {name}, which is damaged",
                code="C008",
            )
        yield chunk
