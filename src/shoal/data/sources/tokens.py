"""Token shards: files of token ids only. They stay on disk, mapped into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import TOKEN_ENDINGS, files_under, megabytes, reject_irregular, unreadable
from shoal.errors import ShoalError

READ_AT_MOST = 1 << 30
"""Bytes of shards up to which the largest token id is searched; beyond that it is unknown."""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Shards:
    """The streams, one per file, their vocabulary if known, and their origin."""

    streams: list[Tokens]
    vocabulary: int | None
    origin: str


def open_shards(path: Path, dtype: str) -> Shards:
    """Map a `.bin` or `.npy` file, or all of them below a folder in sorted order."""
    files = files_under(path, TOKEN_ENDINGS)
    if not files:
        raise ShoalError(f"no token shards (.bin, .npy) in {path}", fix="--data.format auto", code="D016")
    streams = [_map_npy(file) if file.suffix.lower() == ".npy" else _map_bin(file, dtype) for file in files]
    size = sum(stream.nbytes for stream in streams)
    vocabulary = 1 + max(map(_largest, files, streams)) if size <= READ_AT_MOST else None
    known = f", token ids up to {vocabulary - 1:,}" if vocabulary else ""
    what = f"{len(files):,} token shards in {path}" if path.is_dir() else f"token shard {path}"
    return Shards(streams, vocabulary, f"{what}, {megabytes(size)}{known}")


def _map_bin(file: Path, dtype: str) -> Tokens:
    reject_irregular(file)
    try:
        size, width = file.stat().st_size, np.dtype(dtype).itemsize
        if size == 0 or size % width:
            raise ShoalError(
                f"{file} must hold a whole number of {dtype} tokens of {width} bytes, got {size:,} bytes",
                fix="--data.token_dtype DTYPE of the file" if size else f"--data.source PATH without {file.name}",
                code="D021",
            )
        return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise unreadable(file, error) from error


def _map_npy(file: Path) -> Tokens:
    reject_irregular(file)
    try:
        stream = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, EOFError) as error:
        raise ShoalError(f"{file} must be a .npy file: {error}", fix="numpy.save(file, tokens)", code="D022") from error
    if stream.ndim != 1 or not np.issubdtype(stream.dtype, np.integer):
        raise ShoalError(
            f"{file} must hold one row of integers, got {stream.dtype} of shape {stream.shape}",
            fix="numpy.save(file, tokens.ravel().astype('uint16'))",
            code="D022",
        )
    return stream  # type: ignore[no-any-return]


def _largest(file: Path, stream: Tokens) -> int:
    """The largest id, read in chunks to save memory."""
    chunks = [stream[start : start + _CHUNK] for start in range(0, len(stream), _CHUNK)]
    smallest = min((int(chunk.min()) for chunk in chunks), default=0) if stream.dtype.kind == "i" else 0
    if smallest < 0:
        raise ShoalError(
            f"token ids must be at least 0, got {smallest} in {file}", fix="--data.token_dtype uint32", code="D023"
        )
    return max((int(chunk.max()) for chunk in chunks), default=0)
