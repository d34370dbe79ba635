"""A folder in shared memory that outlives the workers of a run and is removed with the run.

The process that starts the workers creates it and holds a lock in it. If that process fails, it first saves to disk
any step that only the folder has. A killed process leaves a folder without a held lock. The next process of the same
run saves its state to the disk of that run and removes it. A folder with the state of another run is left for that run.

Other users can make folders with the same names there: see `shoal.train.recipe.saving.memory_flush`.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shoal.checkpoint.storage.store import Store
from shoal.files import PrivateFolder
from shoal.observe.run_lock import locked
from shoal.train.recipe.saving.memory_flush import (
    DISK,
    cannot_hold,
    flush_memory_tier,
    memory_folder,
    newest_in,
    place_of,
    private_folders,
    recorded_place,
    say_ignored,
)

LOCK = "lock"

Say = Callable[[str], None]


@contextmanager
def memory_tier(where: str, say: Say, *, saves_to: str) -> Iterator[Path]:
    """A new folder in a memory file system for the duration of the context. `saves_to`: the run's checkpoints."""
    with memory_folder(where) as parent:
        _sweep(where, parent, place_of(saves_to), say)
        name, folder, lock = _new(where, parent)
        is_done = True
        try:
            yield Path(where) / name
        except BaseException:
            is_done = _saved(folder, os.path.join(where, name), say)
            raise
        finally:
            if is_done:
                _remove(folder, name, parent)
            os.close(lock)
            folder.close()


def _new(where: str, parent: int) -> tuple[str, PrivateFolder, int]:
    """Create a folder, and take the lock in it."""
    while True:
        try:
            name = Path(tempfile.mkdtemp(prefix=_prefix(), dir=where)).name
            folder = PrivateFolder(name, parent=parent)
            lock = folder.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise cannot_hold(where, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            os.close(lock)
            _remove(folder, name, parent)
            folder.close()
            raise cannot_hold(where, error) from None
        if os.fstat(lock).st_nlink:  # else another process has removed it before it was locked
            return name, folder, lock
        os.close(lock)
        folder.close()


def _sweep(where: str, parent: int, saves_to: str, say: Say) -> None:
    """Remove the private folders of this user that no process has locked, if their state is on disk."""
    ignored: dict[str, OSError] = {}
    for name, found in private_folders(parent, _prefix()):
        if isinstance(found, OSError):
            ignored[name] = found
            continue
        try:
            with _held(found):
                if _is_done_with(found, os.path.join(where, name), saves_to, say):
                    _remove(found, name, parent)
        except (BlockingIOError, FileNotFoundError):  # a process has locked it, or has just made it
            continue
        except OSError as error:
            ignored[name] = error
    say_ignored(where, ignored, say)


@contextmanager
def _held(folder: PrivateFolder) -> Iterator[None]:
    """Take the lock of a folder for the duration of the context; `BlockingIOError` if a process has it."""
    lock = folder.open(LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _is_done_with(folder: PrivateFolder, path: str, saves_to: str, say: Say) -> bool:
    """Whether an unlocked folder can be removed: its state is on disk, or it has none."""
    newest, recorded = newest_in(folder), recorded_place(folder)
    if newest is None:
        return True
    if recorded in ("", saves_to):
        return _saved(folder, path, say)
    say(f"{path!r} holds step {newest[0]} of the run that saves to {recorded!r}: resume that run, or remove the folder")
    return False


def _saved(folder: PrivateFolder, path: str, say: Say) -> bool:
    """Save a folder's newest step to its recorded place, unless that has a newer one; return False if it could not."""
    try:
        newest, place = newest_in(folder), recorded_place(folder)
        if newest is not None and not place:
            say(
                f"{path!r} holds step {newest[0]} without a record of its run's checkpoints, and is left there\n"
                f"    fix: printf %s /path/of/its/checkpoints > {path}/{DISK}, and resume that run; or remove it"
            )
            return False
        step = _flushed(folder, newest[0], Store.at(place)) if newest is not None else None
    except Exception as error:  # it must not hide the error that ended the run
        say(f"the checkpoint in memory could not be saved to disk, and is left in {path}: {error}")
        return False
    if step is not None:
        say(f"step {step} was saved from memory to disk")
    return True


def _flushed(folder: PrivateFolder, newest: int, disk: Store) -> int | None:
    """Save the newest step, unless the disk has one as new; `ShoalError` if another run is saving there."""
    if newest <= max(disk.steps(), default=-1):
        return None
    with ExitStack() as stack:
        if disk.disk.renames:  # it is a directory of this machine
            disk.disk.make(disk.root)
            stack.enter_context(locked(disk.root))
            if (disk.root.parent / LOCK).exists():  # the lock of a run directory
                stack.enter_context(locked(disk.root.parent))
        return flush_memory_tier(folder, disk)


def _remove(folder: PrivateFolder, name: str, parent: int) -> None:
    """Remove by descriptors: whatever the name is by now, only an empty folder is removed under it."""
    folder.remove_all()
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)


def _prefix() -> str:
    return f"shoal-tier-{os.geteuid()}-"
