"""A folder in shared memory that outlives the workers of a run, and goes when the run does.

The process that starts the workers makes it and holds a lock in it. If it gives up, what is in there and not on the
disk goes to the disk first. A process that was killed itself leaves a folder without a lock: the next one of the same
run saves it to the disk of that run, and removes it. A folder with the state of another run is left for that run.

Others can make folders with the same names there: see `shoal.train.recipe.memory_rescue`.
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
from shoal.observe.run_directory import locked
from shoal.train.recipe.memory_rescue import (
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
    """A new folder in a memory file system, for as long as the context lasts. `saves_to`: where the run saves."""
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
    """A new folder, and the lock in it, which this process holds."""
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
        if os.fstat(lock).st_nlink:  # else another process has found it before it was locked, and removed it
            return name, folder, lock
        os.close(lock)
        folder.close()


def _sweep(where: str, parent: int, saves_to: str, say: Say) -> None:
    """Remove the private folders of this user that no process holds, when the state in them is on the disk."""
    ignored: dict[str, OSError] = {}
    for name, found in private_folders(parent, _prefix()):
        if isinstance(found, OSError):
            ignored[name] = found
            continue
        try:
            with _held(found):
                if _is_done_with(found, os.path.join(where, name), saves_to, say):
                    _remove(found, name, parent)
        except (BlockingIOError, FileNotFoundError):  # a process holds it, or has just made it
            continue
        except OSError as error:
            ignored[name] = error
    say_ignored(where, ignored, say)


@contextmanager
def _held(folder: PrivateFolder) -> Iterator[None]:
    """The lock of a folder, for as long as the context lasts; `BlockingIOError` if a process has it."""
    lock = folder.open(LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _is_done_with(folder: PrivateFolder, path: str, saves_to: str, say: Say) -> bool:
    """Whether a folder that no process holds can go: what it has is on the disk, or it has nothing."""
    newest, recorded = newest_in(folder), recorded_place(folder)
    if newest is None:
        return True
    if recorded in ("", saves_to):
        return _saved(folder, path, say)
    say(f"{path!r} holds step {newest[0]} of the run that saves to {recorded!r}: start that run again, or remove it")
    return False


def _saved(folder: PrivateFolder, path: str, say: Say) -> bool:
    """Save what a folder has to the place that is recorded in it, if it is newer than what is there; whether nothing is
    left to save."""
    try:
        newest, place = newest_in(folder), recorded_place(folder)
        if newest is not None and not place:
            say(
                f"{path!r} holds step {newest[0]} and does not say where its run saves: it is left there\n"
                f"    fix: printf %s /path/of/its/checkpoints > {path}/{DISK}, and start that run again; or remove it"
            )
            return False
        step = _rescued(folder, newest[0], Store.at(place)) if newest is not None else None
    except Exception as error:  # whatever it is, it must not hide why the run has ended
        say(f"what was kept in memory could not be saved, and is left in {path}: {error}")
        return False
    if step is not None:
        say(f"step {step}, which was kept in memory, is on the disk now")
    return True


def _rescued(folder: PrivateFolder, newest: int, disk: Store) -> int | None:
    """Save the newest step, unless the disk has one as new; `ShoalError` if another run saves there now."""
    if newest <= max(disk.steps(), default=-1):
        return None
    with ExitStack() as stack:
        if disk.disk.renames:  # it is a directory of this machine
            disk.disk.make(disk.root)
            stack.enter_context(locked(disk.root))
            if (disk.root.parent / LOCK).exists():  # that of a run, in its own directory
                stack.enter_context(locked(disk.root.parent))
        return flush_memory_tier(folder, disk)


def _remove(folder: PrivateFolder, name: str, parent: int) -> None:
    """By descriptors alone: whatever the name leads to by now, only an empty folder goes with it."""
    folder.remove_all()
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)


def _prefix() -> str:
    return f"shoal-tier-{os.geteuid()}-"
