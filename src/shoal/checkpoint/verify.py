"""Read every byte of a checkpoint, and compare it with the manifest's hashes. Nothing here imports torch.

Loading checks what it reads and stops at the first difference. This reads everything, on several threads, and lists all
damage: the file, the bytes, and the tensors in them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.checkpoint.storage.filesystem import Source
from shoal.checkpoint.storage.locate import SavedStep
from shoal.checkpoint.storage.manifest import CHUNK, NAME, SIZES, File, Piece

MOST_HEADER = 100 * 2**20
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Damage:
    """A part of a step that differs from what was written."""

    file: str
    what: str
    begin: int | None = None
    end: int | None = None
    """The range of bytes; None: the full file, or no range."""
    tensors: tuple[str, ...] = ()
    """The affected tensors, as far as they are known."""


@dataclass(frozen=True)
class StepVerdict:
    """The result of verifying a step."""

    num_bytes: int
    """Bytes that were read."""
    damages: tuple[Damage, ...]
    unlisted: tuple[str, ...]
    """Files that are not in the manifest. They are ignored when loading."""

    @property
    def is_intact(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damages


def verify(step: SavedStep, progress: Callable[[int], None] = lambda size: None) -> StepVerdict:
    """Read a full step; `progress` is called with the bytes of each part."""
    damages: list[Damage] = []
    num_bytes = 0

    def count(size: int) -> None:
        nonlocal num_bytes
        num_bytes += size
        progress(size)

    with ThreadPoolExecutor(THREADS) as threads:
        for name in step.manifest.files:
            damages += _check(step, name, threads, count)
    if not step.manifest.tensors:
        damages.append(Damage(NAME, "lists no tensor"))
    known = {NAME, *step.manifest.files}
    return StepVerdict(num_bytes, tuple(damages), tuple(sorted(set(step.disk.names(step.path)) - known)))


def _check(step: SavedStep, name: str, threads: ThreadPoolExecutor, count: Callable[[int], None]) -> Iterator[Damage]:
    file = step.manifest.files[name]
    there = {
        piece.key: (entry.dtype, piece)
        for entry in step.manifest.tensors.values()
        for piece in entry.pieces
        if piece.file == name
    }
    try:
        source = step.disk.open(step.path / name)
    except OSError as error:
        yield Damage(name, f"cannot be read: {error.strerror or error}", tensors=tuple(there))
        return
    try:
        size = source.size
        header, start = _header(source)
        places = _places(header, start) if header else {}
        if size != file.size:
            what = f"has {size:,} bytes, and the manifest lists {file.size:,}"
            begin, end = sorted((size, file.size))
            yield Damage(name, what, begin, end, _tensors_in(places, begin, end))
        num_whole = min(size, file.size) // CHUNK if size != file.size else len(file.hashes)
        found = threads.map(partial(_digest, source), range(num_whole))
        for begin, end, what in _joined(_differing(found, file, count)):
            yield Damage(name, what, begin, end, _tensors_in(places, begin, end) if header else tuple(there))
        if header is None:
            yield Damage(name, "has no readable header", 0, 8, tuple(there))
        else:
            yield from _mismatches(name, header, file.size - start, there)
    finally:
        source.close()


def _digest(source: Source, number: int) -> tuple[int, str | OSError]:
    """Return the size of a chunk, and its hash or the reason why it cannot be read."""
    try:
        chunk = _part(source, number * CHUNK, CHUNK)
    except OSError as error:
        return 0, error
    return len(chunk), hashlib.sha256(chunk).hexdigest()


def _part(source: Source, begin: int, size: int) -> memoryview:
    """Return bytes of a file; fewer, if it ends before."""
    view = memoryview(bytearray(max(0, min(size, source.size - begin))))
    return view[: source.read_into(begin, view)] if view else view


def _differing(
    found: Iterable[tuple[int, str | OSError]], file: File, count: Callable[[int], None]
) -> Iterator[tuple[int, int, str]]:
    for number, (size, digest) in enumerate(found):
        count(size)
        begin, end = number * CHUNK, min((number + 1) * CHUNK, file.size)
        if isinstance(digest, OSError):
            yield begin, end, f"cannot be read: {digest.strerror or digest}"
        elif digest != file.hashes[number]:
            yield begin, end, "differ from what was written"


def _joined(ranges: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Merge adjacent ranges of one kind.

    >>> _joined([(0, 4, "x"), (4, 8, "x"), (12, 16, "x")])
    [(0, 8, 'x'), (12, 16, 'x')]
    """
    joined: list[tuple[int, int, str]] = []
    for begin, end, what in ranges:
        if joined and joined[-1][1:] == (begin, what):
            begin = joined.pop()[0]
        joined.append((begin, end, what))
    return joined


def _header(source: Source) -> tuple[dict[str, Any] | None, int]:
    """Return the header of a file, and where its values begin; None if it makes no sense. Loading trusts only bytes
    with the right hash; here the header serves to name the affected tensors."""
    try:
        length = int.from_bytes(_part(source, 0, 8), "little")
        if length > min(MOST_HEADER, source.size - 8):
            return None, 0
        header = json.loads(bytes(_part(source, 8, length)))
        header.pop("__metadata__", None)
        _places(header, 0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, 0
    return header, 8 + length


def _places(header: dict[str, Any], start: int) -> dict[str, tuple[int, int]]:
    """Map keys to their bytes in the file."""
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
    """Yield what differs between the manifest and a file's header."""
    for key, (dtype, piece) in there.items():
        entry = header.get(key)
        if entry is None:
            yield Damage(file, "lacks a tensor that the manifest lists", tensors=(key,))
            continue
        if entry.get("dtype") != dtype or list(entry.get("shape", ())) != list(piece.shape):
            what = f"has {entry.get('dtype')} {entry.get('shape')}, and the manifest lists {dtype} {list(piece.shape)}"
            yield Damage(file, what, tensors=(key,))
            continue
        begin, end = entry["data_offsets"]
        wanted = SIZES[dtype]
        for extent in piece.shape:
            wanted *= extent
        if not 0 <= begin <= end <= num_bytes or end - begin != wanted:
            what = f"has {end - begin:,} bytes at {begin:,}, and the tensor needs {wanted:,} within {num_bytes:,}"
            yield Damage(file, what, tensors=(key,))
