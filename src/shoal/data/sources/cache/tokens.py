"""Tokens of a source in one file of the cache, mapped into memory.

Samples are cut from a stream of tokens, so the place of a sample is known only when all text before it is tokenized.
Row groups of a Parquet file or shards of a stream give no random access to samples. So rows are read once, in order and
a few at a time, and their tokens are appended to a file. Later runs, and other ranks of the host, map that file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.sources.cache.folder import Progress, locked, replaced
from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import megabytes
from shoal.errors import ShoalError
from shoal.files import read_regular

Encoded = tuple[Tokens, int]
"""Tokens, at least one, and the number of documents that they are."""
VERSION = 2
"""Of the way from rows to tokens. 2: documents begin with BOS, and are never cut or padded."""
MOST_DESCRIPTION = 2**16


@dataclass(frozen=True, slots=True)
class Description:
    """What a file of tokens holds."""

    tokens: int
    documents: int
    vocabulary: int
    """The largest token id, plus one."""
    dtype: str


def cached_tokens(
    folder: Path, key: Mapping[str, Any], parts: Callable[[], Iterable[Encoded]], *, dtype: str, what: str
) -> tuple[Tokens, Description]:
    """All tokens, one after the other, from the cache or from `parts()`. `key` has everything that decides them."""
    text = json.dumps({"version": VERSION, "dtype": dtype, **key}, sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    file = folder / f"{name}.bin"
    with locked(folder / f"{name}.lock", f"tokenizes {what}"):
        found = _read(file, dtype)
        if found is None:
            found = _write(file, parts(), dtype, what)
    if not found.tokens:
        return np.empty(0, dtype=dtype), found
    return np.memmap(file, dtype=dtype, mode="r", shape=(found.tokens,)), found


def _read(file: Path, dtype: str) -> Description | None:
    """The description of a complete file; None: there is none."""
    try:
        found = Description(**json.loads(read_regular(file.with_suffix(".json"), MOST_DESCRIPTION)))
        is_whole = found.dtype == dtype and file.stat().st_size == found.tokens * np.dtype(dtype).itemsize
    except (OSError, ValueError, TypeError):
        return None
    return found if is_whole else None


def _write(file: Path, parts: Iterable[Encoded], dtype: str, what: str) -> Description:
    """Write the tokens, then their description, which makes the file complete."""
    progress, largest = Progress(f"tokenizing {what}"), np.iinfo(dtype).max
    tokens = count = vocabulary = 0
    with replaced(file) as out:
        for part, number in parts:
            low, high = int(part.min()), int(part.max())
            if low < 0 or high > largest:
                raise ShoalError(
                    f"token ids must be at least 0, got {low} in {what}"
                    if low < 0
                    else f"token ids must be at most {largest:,}, got {high:,} in {what}",
                    fix="--data.text_field COLUMN of token ids",
                    code="D023",
                )
            out.write(np.ascontiguousarray(part, dtype=dtype).data)
            tokens, count, vocabulary = tokens + len(part), count + number, max(vocabulary, high + 1)
            progress.show(f"{count:,} documents, {megabytes(tokens * np.dtype(dtype).itemsize)} of tokens")
    found = Description(tokens, count, vocabulary, dtype)
    with replaced(file.with_suffix(".json")) as out:
        out.write(json.dumps(asdict(found)).encode())
    return found


def identity_of_files(files: Iterable[Path]) -> Iterator[list[Any]]:
    """Path, size and times of each file. The time of the last change of its state cannot be set by a program, so that
    a file that was written to always has another one."""
    for file in files:
        found = file.stat()
        yield [str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns]
