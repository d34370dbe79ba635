"""The key of a run: a secret that every rank must hold before another rank accepts it.

shoal's own launcher creates a key per launch and passes it to its workers. Under torchrun, srun, mpirun or a script's
own variables, it is `SHOAL_KEY`, or the content of `SHOAL_KEY_FILE`, or of `~/.config/shoal/key`. The first rank of a
user creates that file, readable by this user alone. So one host needs no set-up, nor do several that share a home.
If that file cannot be used, a run on one host uses a file in a private folder of /tmp.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.errors import ShoalError
from shoal.files import PrivateFolder, open_regular

LEAST = 16  # characters
MOST = 4096
MAKE_ONE = "export SHOAL_KEY=$(openssl rand -hex 32)"
_SHARED = Path("/tmp")
_NAME = "key"
_HAS_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Key:
    """A secret of 32 bytes, and its source for messages."""

    secret: bytes = field(repr=False)
    source: str


def key_of(place: Placement) -> Key:
    """Return the key of this rank. The user's key file is created if there is none."""
    if place.key is not None:
        return _key(place.key, "SHOAL_KEY" if place.source != "shoal" else "the launcher")
    if place.key_file is not None:
        return _named(place.key_file)
    problems = []
    for folder in _usual_folders(is_one_host=place.local_world_size == place.world_size):
        path = folder / _NAME
        try:
            with _opened(folder) as handle:
                content = _read(_NAME, handle) or _made(handle)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        else:
            return _key(_checked(content, path), str(path))
    raise ShoalError(f"no key file can be used: {'; '.join(problems)}", fix=f"{MAKE_ONE}, on every host", code="N008")


def _named(name: str) -> Key:
    """Read the key from SHOAL_KEY_FILE, which may be a symbolic link."""
    make = f"(umask 077; openssl rand -hex 32 > {name})"
    try:
        path = Path(name).expanduser()
        content = _read(path)
    except FileNotFoundError:
        raise ShoalError(f"SHOAL_KEY_FILE={name!r} does not exist", fix=make, code="N008") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: ~user of a user that does not exist
        what = f"SHOAL_KEY_FILE={name!r} cannot be used: {getattr(error, 'strerror', None) or error}"
        raise ShoalError(
            what, fix=f"export SHOAL_KEY_FILE=<a file of your own with mode 0600>, or {MAKE_ONE}", code="N008"
        ) from None
    return _key(_checked(content, path), str(path))


def _usual_folders(*, is_one_host: bool) -> list[Path]:
    """Return the folders of a user's key: at home, and for a run on one host also in /tmp."""
    folders = []
    with contextlib.suppress(RuntimeError):  # a user without a home directory
        folders.append(Path.home() / ".config" / "shoal")
    if is_one_host:
        folders.append(_SHARED / f"shoal-{os.geteuid()}")
    return folders


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open the folder, and create it if needed. In a directory that all users share, another user may have created it:
    it must be private."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent == _SHARED:
        with PrivateFolder(folder) as private:
            yield private.handle
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _read(path: str | Path, folder: int | None = None) -> bytes:
    """Read a regular file that only this user can read, else raise `OSError`. In a folder, do not follow symbolic
    links, and return no content if the file does not exist."""
    nofollow = 0 if folder is None else os.O_NOFOLLOW
    try:
        handle = open_regular(path, os.O_RDONLY | nofollow, dir_fd=folder)
    except FileNotFoundError:
        if folder is None:
            raise
        return b""
    with os.fdopen(handle, "rb") as file:
        _reject_shared(os.fstat(handle))
        return file.read(MOST + 1).strip()


def _reject_shared(found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it must belong to user {os.geteuid()}, got user {found.st_uid}")
    if found.st_mode & 0o077:
        what = f"it must be readable by its owner alone (mode 0600), got mode {found.st_mode & 0o777:04o}"
        raise PermissionError(errno.EPERM, f"{what}; others may know this key, so remove the file")


def _made(folder: int) -> bytes:
    """Create the file with a new key, atomically; return its content, or that of a rank that was faster."""
    new = f"{_NAME}.{secrets.token_hex(8)}"
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(f"{secrets.token_hex(32)}\n".encode())
            file.flush()
            os.fsync(file.fileno())  # a full disk may be noticed only here
        _link(new, folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
    return _read(_NAME, folder)


def _link(new: str, folder: int) -> None:
    """Give the new file its name, unless a file with a key has it."""
    try:
        os.link(new, _NAME, src_dir_fd=folder, dst_dir_fd=folder)
        return
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _HAS_NO_LINKS:
            raise
    _replace_empty(new, folder)


def _replace_empty(new: str, folder: int) -> None:
    """Put the new file in the place of an empty one, which an earlier version left on a full disk. Of several ranks one
    replaces it: each locks the empty file, and then looks whether it still has the name."""
    handle = open_regular(_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        found = os.fstat(handle)
        is_same = os.path.samestat(found, os.stat(_NAME, dir_fd=folder, follow_symlinks=False))
        if is_same and found.st_size == 0:
            os.replace(new, _NAME, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(handle)


def _checked(content: bytes, path: Path) -> bytes:
    if not LEAST <= len(content) <= MOST:
        what = f"the key in {str(path)!r} must have {LEAST} to {MOST} characters, got {len(content)}"
        raise ShoalError(what, fix=f"rm {path}; (umask 077; openssl rand -hex 32 > {path})", code="N009")
    return content


def _key(content: bytes, source: str) -> Key:
    if len(content) < LEAST:
        raise ShoalError(
            f"{source} must have at least {LEAST} characters, got {len(content)}", fix=MAKE_ONE, code="N009"
        )
    return Key(hashlib.sha256(content).digest(), source)
