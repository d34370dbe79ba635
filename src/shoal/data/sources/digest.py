"""A cheap hash of samples: equal for a copy, different for other values.

A digest covers values, in the order in which samples are numbered. It has no path and no time, since a copy is the same
data. It covers

    tokens (also text, after its tokenizer)   up to `WHOLE` bytes: every token. More: the length of every stream, its
                                              first and last bytes, and blocks that are spread evenly over all of it
    images                                    every name below the folder, and of up to `FILES` files, spread evenly,
                                              the size and both ends of the content
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.data.sources.files import unreadable

WHOLE = 64 * 2**20
"""Bytes of tokens up to which all of them are hashed, in a fifth of a second."""

BLOCK = 64 * 2**10
NUM_BLOCKS = 512
END = 4 * 2**10
"""Bytes at both ends of each stream, of streams that are not hashed whole."""

FILES = 512
"""Images of which the content is hashed."""

Tokens = npt.NDArray[np.integer]


def digest_of_streams(streams: Sequence[Tokens]) -> str:
    """A digest of tokens: of all up to `WHOLE` bytes, else of a part."""
    total = sum(stream.nbytes for stream in streams)
    return hashed(_all_parts(streams) if total <= WHOLE else _some_parts(streams, total))


def digest_of_files(root: Path, files: Sequence[Path]) -> str:
    """A digest of many small files: all names, and both ends of some."""

    def parts() -> Iterator[bytes]:
        for file in files:
            yield os.fsencode(file.relative_to(root)) + b"\0"
        for number in _spread(len(files), FILES):
            yield _ends_of(files[number])

    return hashed(parts())


def hashed(parts: Iterable[bytes | memoryview]) -> str:
    """One digest of parts and their lengths, so that boundaries make a difference."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _all_parts(streams: Sequence[Tokens]) -> Iterator[bytes | memoryview]:
    for stream in streams:
        yield f"{stream.dtype.str} {len(stream)}".encode()
        step = max(1, 2**24 // stream.itemsize)
        for start in range(0, len(stream), step):
            yield _bytes(stream[start : start + step])


def _some_parts(streams: Sequence[Tokens], total: int) -> Iterator[bytes | memoryview]:
    before = 0
    places = [number * total // NUM_BLOCKS for number in range(NUM_BLOCKS)]  # in bytes, over all streams
    for stream in streams:
        yield f"{stream.dtype.str} {len(stream)}".encode()
        yield _bytes(stream[: END // stream.itemsize])
        for place in places[bisect_left(places, before) : bisect_left(places, before + stream.nbytes)]:
            start = (place - before) // stream.itemsize
            yield _bytes(stream[start : start + BLOCK // stream.itemsize])
        yield _bytes(stream[-(END // stream.itemsize) :])
        before += stream.nbytes


def _bytes(tokens: Tokens) -> memoryview:
    return np.ascontiguousarray(tokens).view(np.uint8).data


def _spread(count: int, most: int) -> Iterator[int]:
    """Up to `most` numbers below `count`, evenly spaced, the first and the last among them.

    >>> list(_spread(3, 8)), list(_spread(100, 4))
    ([0, 1, 2], [0, 33, 66, 99])
    """
    taken = min(count, most)
    return (number * (count - 1) // max(1, taken - 1) for number in range(taken))


def _ends_of(file: Path) -> bytes:
    try:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            first = content.read(BLOCK)
            content.seek(max(content.tell(), size - BLOCK))
            return size.to_bytes(8, "little") + first + content.read(BLOCK)
    except OSError as error:
        raise unreadable(file, error) from error
