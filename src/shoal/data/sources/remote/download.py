"""Download the files of a URL into the cache, once per host.

    remote/HASH_OF_URL/files/...       the files, under their names below the URL
    remote/HASH_OF_URL/manifest.json   URL, size and version of each, and the job that has listed them
    remote/HASH_OF_URL.lock            held by the process that lists and downloads

The ranks of a host are one job, so that the first lists the files and the others use its list. The next job lists them
again, and downloads those that are new or have another size or version. Each file has a temporary name until all of it
is there and its size, checksum and version are as listed.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from shoal.data.sources.cache.folder import Progress, cache_folder, locked, replaced, say
from shoal.data.sources.files import megabytes
from shoal.data.sources.remote.http import HttpStore
from shoal.data.sources.remote.isolated import in_child
from shoal.data.sources.remote.job import job_of_this_process
from shoal.data.sources.remote.listing import RemoteFile, RemoteStore, checked
from shoal.data.sources.remote.manifest import Manifest, read_manifest, write_manifest
from shoal.data.sources.remote.object_store import ObjectStore
from shoal.errors import ShoalError
from shoal.url_filesystem import fix_of

CHUNK = 2**20
TRIES = 3
AT_ONCE = 8
"""Files that are downloaded at a time."""
WEB = ("http", "https")
LOCAL = ("file", "local")
FAILURES = (OSError, http.client.HTTPException, ValueError, RuntimeError)
"""Errors of urllib, of fsspec's file systems, and of the packages below them."""


def is_url(source: str) -> bool:
    """Whether a source is a URL.

    >>> is_url("s3://bucket/a.bin"), is_url("data/a.bin"), is_url("hf:name")
    (True, False, False)
    """
    return "://" in source


def local_copy(url: str, cache: str | None, format: str) -> Path:
    """The path of the downloaded file, or of the folder with all of them. A `file://` URL is a path already."""
    protocol, _, rest = url.partition("://")
    if protocol in LOCAL:
        return Path(rest)
    key = hashlib.blake2b(f"{format} {url}".encode(), digest_size=8).hexdigest()
    folder = cache_folder(cache, "remote") / f"{_readable(rest)}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    job = job_of_this_process()
    with locked(folder.with_name(f"{folder.name}.lock"), f"downloads {url}"):
        manifest = read_manifest(folder, url)
        if manifest is None or manifest.job != job or not manifest.is_whole(folder):
            if protocol in WEB:
                _update(folder, url, format, job)
            else:
                in_child(protocol, _update, folder, url, format, job)
            manifest = read_manifest(folder, url)
    assert manifest is not None
    return folder / "files" / next(iter(manifest.files)) if manifest.is_one_file else folder / "files"


def _readable(rest: str) -> str:
    """The end of a URL, for the name of a folder."""
    last = rest.split("?")[0].rstrip("/").rpartition("/")[2]
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in last)[:40] or "root"


def _update(folder: Path, url: str, format: str, job: str) -> None:
    """List the files, download those that are not there yet, and remove those that are gone."""
    before = read_manifest(folder, url)
    try:
        store: RemoteStore = HttpStore(url) if url.partition("://")[0] in WEB else ObjectStore(url)
        listing = store.list()
    except FAILURES as error:
        if isinstance(error, ShoalError):
            raise
        if before is None or not before.is_whole(folder):
            raise _failed(url, error) from error
        say(f"{url} cannot be listed ({error}); using the copy of {before.when}")
        write_manifest(folder, before.of_job(job))
        return
    files = checked(url, listing.files, format)
    now = Manifest(url, "", time.strftime("%Y-%m-%d %H:%M"), listing.is_one_file)
    missing = []
    for file in files:
        if before is not None and before.has(folder, file):
            now.add(file, folder)
        else:
            missing.append(file)
    _reject_too_large(folder, url, missing)
    _report_changes(url, before, missing)
    _remove_others(folder / "files", {folder / "files" / file.name for file in files})
    try:
        _download_all(store, url, missing, folder, now)
    except BaseException:
        write_manifest(folder, now)  # the next run downloads the rest
        raise
    write_manifest(folder, now.of_job(job))


def _download_all(store: RemoteStore, url: str, files: list[RemoteFile], folder: Path, manifest: Manifest) -> None:
    """Download several files at a time. After an error the others stop, and the complete ones are listed."""
    transfer = Transfer(url, len(files))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tasks = {pool.submit(_download, store, file, folder, transfer): file for file in files}
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            transfer.is_stopped = True
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for task, file in tasks.items():
                if task.done() and not task.cancelled() and task.exception() is None:
                    manifest.add(file, folder)


def _download(store: RemoteStore, file: RemoteFile, folder: Path, transfer: Transfer) -> None:
    """Download one file, with a few tries."""
    path = folder / "files" / file.name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in reversed(range(TRIES)):
        try:
            _try(store, file, path, transfer)
            break
        except FAILURES as error:
            if isinstance(error, ShoalError) and error.codes != ("D092",):
                raise
            if not left or transfer.is_stopped:
                raise error if isinstance(error, ShoalError) else _failed(file.place, error) from error
            time.sleep(TRIES - left)
    transfer.finish()


def _try(store: RemoteStore, file: RemoteFile, path: Path, transfer: Transfer) -> None:
    received, md5 = 0, hashlib.md5(usedforsecurity=False)
    with replaced(path) as out:
        with store.open(file) as content:
            while part := content.read(CHUNK):
                received += len(part)
                md5.update(part)
                out.write(part)
                transfer.receive(len(part))
        if file.size is not None and received != file.size:
            raise _incomplete(file, f"{file.size:,} bytes were listed, and {received:,} arrived")
        if file.md5 is not None and md5.hexdigest() != file.md5:
            raise _incomplete(file, f"its MD5 was listed as {file.md5}, and is {md5.hexdigest()}")
        if file.is_other(store.look_up(file)):
            raise _incomplete(file, "it was changed while it was downloaded")


class Transfer:
    """The state of a download by several threads."""

    def __init__(self, url: str, files: int) -> None:
        self._progress, self._lock = Progress(f"downloading {url}"), threading.Lock()
        self._files, self._done, self._received, self._began = files, 0, 0, time.monotonic()
        self.is_stopped = False
        """Whether threads are to stop, since one of them has failed."""

    def receive(self, size: int) -> None:
        """Count bytes, and print a line now and then; raises if another thread has failed."""
        if self.is_stopped:
            raise InterruptedError("another download has failed")
        with self._lock:
            self._received += size
            rate = megabytes(int(self._received / max(1e-3, time.monotonic() - self._began)))
            done = f"{self._done:,} of {self._files:,} files"
            self._progress.show(f"{done}, {megabytes(self._received)}, {rate} per second")

    def finish(self) -> None:
        """Count a file."""
        with self._lock:
            self._done += 1


def _reject_too_large(folder: Path, url: str, files: list[RemoteFile]) -> None:
    size, free = sum(file.size or 0 for file in files), shutil.disk_usage(folder).free
    if size > free:
        raise ShoalError(
            f"{url} needs {megabytes(size)} in the data cache {folder}, which has {megabytes(free)} left",
            fix="--data.cache FOLDER on a larger disk",
            code="D093",
        )


def _report_changes(url: str, before: Manifest | None, files: list[RemoteFile]) -> None:
    known: Mapping[str, Any] = before.files if before else {}
    changed = [file.name for file in files if file.name in known]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        names = ", ".join(changed[:3])
        say(f"{names}{more} of {url} changed since the last download; downloading again")


def _remove_others(folder: Path, kept: set[Path]) -> None:
    """Remove files that are not at the URL any more. A running job that has mapped them keeps their content."""
    for path, _, names in os.walk(folder):
        for name in names:
            if (file := Path(path) / name) not in kept:
                file.unlink()


def _failed(url: str, error: BaseException) -> ShoalError:
    fix = fix_of(url, error) or "--data.source URL or PATH"
    return ShoalError(f"{url} cannot be read: {type(error).__name__}: {error}", fix=fix, code="D091")


def _incomplete(file: RemoteFile, why: str) -> ShoalError:
    return ShoalError(
        f"the download of {file.place} failed its check: {why}", fix="run the same command again", code="D092"
    )
