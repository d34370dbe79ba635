"""Read every byte of a checkpoint, and hold it against what the manifest says of it. Nothing here imports torch.

Loading checks what it reads and stops at the first byte that differs. This reads all of it, on several threads, and
lists all that is wrong: the file, the bytes, and the tensors that lie there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint.storage.locate import SavedStep
from shoal.checkpoint.storage.manifest import CHUNK, NAME, SIZES, File, Manifest, Piece
from shoal.files import open_regular

MOST_HEADER = 100 * 2**20
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was written."""

    file: str
    what: str
    begin: int | None = None
    end: int | None = None
    """The bytes of the file; None: all of it, or none in particular."""
    tensors: tuple[str, ...] = ()
    """What lies there, as far as that can be told."""


@dataclass(frozen=True)
class StepVerdict:
    """What became of reading a step."""

    num_bytes: int
    """That were read."""
    damages: tuple[Damage, ...]
    unlisted: tuple[str, ...]
    """Files that the manifest does not know. They do no harm: nobody reads them."""

    @property
    def is_whole(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damages


def verify(step: SavedStep, tell: Callable[[int], None] = lambda size: None) -> StepVerdict:
    """Read all of a step; `tell` hears of every part how many bytes it had."""
    damages: list[Damage] = []
    num_bytes = 0

    def count(size: int) -> None:
        nonlocal num_bytes
        num_bytes += size
        tell(size)

    with ThreadPoolExecutor(THREADS) as threads:
        for name, file in step.manifest.files.items():
            damages += _check(step.path / name, file, step.manifest, threads, count)
    if not step.manifest.tensors:
        damages.append(Damage(NAME, "lists no tensor"))
    known = {NAME, *step.manifest.files}
    return StepVerdict(num_bytes, tuple(damages), tuple(sorted({path.name for path in step.path.iterdir()} - known)))


def _check(
    path: Path, file: File, manifest: Manifest, threads: ThreadPoolExecutor, count: Callable[[int], None]
) -> Iterator[Damage]:
    there = {
        piece.key: (entry.dtype, piece)
        for entry in manifest.tensors.values()
        for piece in entry.pieces
        if piece.file == path.name
    }
    try:
        handle = open_regular(path)
    except OSError as error:
        yield Damage(path.name, f"cannot be read: {error.strerror}", tensors=tuple(there))
        return
    try:
        size = os.fstat(handle).st_size
        header, start = _header(handle, size)
        places = _places(header, start) if header else {}
        if size != file.size:
            what = f"has {size:,} bytes, and the manifest says {file.size:,}"
            begin, end = sorted((size, file.size))
            yield Damage(path.name, what, begin, end, _tensors_in(places, begin, end))
        num_whole = min(size, file.size) // CHUNK if size != file.size else len(file.hashes)
        found = threads.map(partial(_digest, handle), range(num_whole))
        for begin, end, what in _joined(_differing(found, file, count)):
            yield Damage(path.name, what, begin, end, _tensors_in(places, begin, end) if header else tuple(there))
        if header is None:
            yield Damage(path.name, "has no header that can be read", 0, 8, tuple(there))
        else:
            yield from _mismatches(path.name, header, file.size - start, there)
    finally:
        os.close(handle)


def _digest(handle: int, number: int) -> tuple[int, str | OSError]:
    """How many bytes a chunk has, and their hash, or why they cannot be read."""
    try:
        chunk = os.pread(handle, CHUNK, number * CHUNK)
    except OSError as error:
        return 0, error
    return len(chunk), hashlib.sha256(chunk).hexdigest()


def _differing(
    found: Iterable[tuple[int, str | OSError]], file: File, count: Callable[[int], None]
) -> Iterator[tuple[int, int, str]]:
    for number, (size, digest) in enumerate(found):
        count(size)
        begin, end = number * CHUNK, min((number + 1) * CHUNK, file.size)
        if isinstance(digest, OSError):
            yield begin, end, f"cannot be read: {digest.strerror}"
        elif digest != file.hashes[number]:
            yield begin, end, "are not those that were written"


def _joined(ranges: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Neighbours of one kind, as one.

    >>> _joined([(0, 4, "x"), (4, 8, "x"), (12, 16, "x")])
    [(0, 8, 'x'), (12, 16, 'x')]
    """
    joined: list[tuple[int, int, str]] = []
    for begin, end, what in ranges:
        if joined and joined[-1][1:] == (begin, what):
            begin = joined.pop()[0]
        joined.append((begin, end, what))
    return joined


def _header(handle: int, size: int) -> tuple[dict[str, Any] | None, int]:
    """What a file says that it holds, and where its values begin; None if that makes no sense. Only what has its hash
    is believed when something is loaded; here it serves to say which tensors are hit."""
    try:
        length = int.from_bytes(os.pread(handle, 8, 0), "little")
        if length > min(MOST_HEADER, size - 8):
            return None, 0
        header = json.loads(os.pread(handle, length, 8))
        header.pop("__metadata__", None)
        _places(header, 0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, 0
    return header, 8 + length


def _places(header: dict[str, Any], start: int) -> dict[str, tuple[int, int]]:
    """Key → its bytes in the file."""
    places = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        places[key] = (start + int(begin), start + int(end))
    return places


def _tensors_in(places: dict[str, tuple[int, int]], begin: int, end: int) -> tuple[str, ...]:
    return tuple(key for key, (first, last) in places.items() if first < end and last > begin)


def _mismatches(
    file: str, header: dict[str, Any], num_bytes: int, there: dict[str, tuple[str, Piece]]
) -> Iterator[Damage]:
    """What the manifest says of a file and its header does not."""
    for key, (dtype, piece) in there.items():
        entry = header.get(key)
        if entry is None:
            yield Damage(file, "does not have what the manifest says is in it", tensors=(key,))
            continue
        if entry.get("dtype") != dtype or list(entry.get("shape", ())) != list(piece.shape):
            what = f"holds {entry.get('dtype')} {entry.get('shape')}, and the manifest says {dtype} {list(piece.shape)}"
            yield Damage(file, what, tensors=(key,))
            continue
        begin, end = entry["data_offsets"]
        wanted = SIZES[dtype]
        for extent in piece.shape:
            wanted *= extent
        if not 0 <= begin <= end <= num_bytes or end - begin != wanted:
            what = f"puts {end - begin:,} bytes at {begin:,}, and {wanted:,} of {num_bytes:,} were to be there"
            yield Damage(file, what, tensors=(key,))
