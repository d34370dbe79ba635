"""Checks of directories: can this user write, rename, sync and lock files there, and is there room."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shoal.doctor.bounded import Check
from shoal.doctor.finding import GIB, Finding, hint, ok, size, warning, will_fail

LITTLE = GIB
"""Free bytes below which a directory is nearly full."""
FEW_INODES = 1000
SLOW_SYNC = 1.0
"""Seconds of a write with fsync above which each save waits for the disk."""
SECONDS = 4.0


def checks() -> Iterator[Check]:
    """The checks of directories that every run uses."""
    yield Check("temporary files", ignored_tmpdir)
    yield directory_check("temporary files", Path(tempfile.gettempdir()), "export TMPDIR=/a/directory/of/this/host")
    yield directory_check("working directory", Path.cwd(), "cd SOMEWHERE_ELSE   # or --run.dir SOMEWHERE_ELSE")


def directory_check(name: str, path: Path, fix: str, needed: int = 0) -> Check:
    """The check of one directory; it has a longer limit, and a finding of its own if the file system hangs."""

    def hangs(seconds: float) -> Finding:
        evidence = f"{path}: a small file was not written within {seconds:g} s; the file system hangs"
        return will_fail(name, evidence, fix)

    return Check(name, lambda: writable(name, path, fix, needed), SECONDS, hangs)


def nearest_existing(path: Path) -> Path:
    """The directory itself, or the first of its parents that exists: the others will be made in it."""
    # Path.exists would raise without permission.
    return next(each for each in (path, *path.absolute().parents) if os.path.exists(each))


def writable(name: str, path: Path, fix: str, needed: int = 0) -> Iterator[Finding]:
    """Write, sync, rename, lock and remove a file; compare the room with what is needed (0: unknown)."""
    where = nearest_existing(path)
    began = time.perf_counter()
    try:
        has_locks = _try_all(where)
    except OSError as error:
        missing = "" if where == path else f" ({path} would be made in it)"
        yield will_fail(name, f"{where}{missing}: {error.strerror}", fix)
        return
    seconds = time.perf_counter() - began
    found = os.statvfs(where)
    free = found.f_bavail * found.f_frsize
    if needed and free < needed:
        yield will_fail(name, f"{where} has {size(free)} free; {size(needed)} are needed", fix)
    elif free < LITTLE:
        yield warning(name, f"{where} has {size(free)} free", fix)
    elif found.f_files and found.f_favail < FEW_INODES:
        yield warning(name, f"{where} has room for {found.f_favail:,} more files (inodes)", fix)
    elif seconds > SLOW_SYNC:
        yield warning(name, f"{where} took {seconds:.1f} s to sync 4 KiB", fix)
    elif not has_locks:
        yield warning(name, f"{where} has no file locks: two runs may write to one directory", fix)
    else:
        enough = f"; {size(needed)} are needed" if needed else ""
        yield ok(name, f"{where} is writable, {size(free)} free{enough}")


def _try_all(where: Path) -> bool:
    """Raise the error of a write, an fsync or a rename; whether the file system has locks."""
    handle, name = tempfile.mkstemp(prefix=".shoal-doctor-", dir=where)
    has_locks = True
    try:
        try:
            os.write(handle, bytes(4096))
            os.fsync(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                has_locks = False
        finally:
            os.close(handle)
        os.rename(name, f"{name}.renamed")
        name = f"{name}.renamed"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return has_locks


def free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write there; None: unknown."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def readable(name: str, path: Path, fix: str) -> Iterator[Finding]:
    """The first file of a path must be readable."""
    try:
        files = sorted(each for each in path.rglob("*") if each.is_file())[:3] if path.is_dir() else [path]
        if not files:
            yield will_fail(name, f"{path} has no files", fix)
            return
        total = 0
        for each in files:
            with each.open("rb") as file:
                total += len(file.read(4096))
    except OSError as error:
        yield will_fail(name, f"{error.filename or path}: {error.strerror}", fix)
        return
    yield ok(name, f"{path} is readable") if total else will_fail(name, f"{path} is empty", fix)


MOST_FILES = 10_000
"""Files that are counted: a list of all could take longer than a host may be silent."""


def contents(path: Path) -> str:
    """How many files a path has and how large they are, to compare it between hosts; empty: it cannot be read."""
    try:
        found = (each for each in path.rglob("*") if each.is_file()) if path.is_dir() else iter([path])
        every = list(islice(found, MOST_FILES + 1))  # in an order that differs between hosts
        sizes = [each.stat().st_size for each in every]
    except OSError:
        return ""
    if len(every) > MOST_FILES:
        return f"more than {MOST_FILES:,} files"
    return f"{len(every):,} file{'s' * (len(every) != 1)} of {sum(sizes):,} bytes"


def ignored_tmpdir() -> Iterator[Finding]:
    """Python takes another directory, without a word, where that of TMPDIR cannot be used."""
    named, used = os.environ.get("TMPDIR", ""), tempfile.gettempdir()
    if named and os.path.abspath(named) != used:
        evidence = f"TMPDIR={named} cannot be used, and temporary files go to {used}"
        yield warning("temporary files", evidence, f"mkdir -p {shlex.quote(named)}   # or: unset TMPDIR")


def home() -> Iterator[Finding]:
    """Calibrations, keys and caches are in the home directory."""
    try:
        path = Path.home()
    except RuntimeError:
        yield hint(
            "home directory", "this user has none: caches and calibrations are not kept", "export HOME=/a/folder"
        )
        return
    if not os.access(nearest_existing(path), os.W_OK):
        yield hint("home directory", f"{path} is not writable: caches are not kept", "export HOME=/a/folder")
