"""Tokens of Parquet files, through the cache: of a column of text, or of a column with lists of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from shoal.config.recipe import DataSection
from shoal.data.sources.cache.folder import cache_folder
from shoal.data.sources.cache.tokens import Description, Encoded, cached_tokens, identity_of_files
from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import megabytes
from shoal.data.sources.parquet.read import text_rows, token_rows
from shoal.data.sources.tokenizer import DOCUMENTS_AT_ONCE, Tokenizer
from shoal.data.sources.tokens import Shards
from shoal.errors import ShoalError


def cached_text(section: DataSection, tokenizer: Tokenizer, files: Sequence[Path], path: Path) -> tuple[Tokens, str]:
    """The tokens of a column of text, and their origin. Each row is a document with an end token."""
    key = {"files": list(identity_of_files(files)), "column": section.text_field, "tokenizer": identity(section)}
    stream, found = cached_tokens(
        cache_folder(section.cache, "tokens"),
        key,
        lambda: encoded(text_rows(files, section.text_field), tokenizer),
        dtype=dtype_of(tokenizer),
        what=str(path),
    )
    return stream, _origin(found, section.text_field, path)


def cached_ids(section: DataSection, files: Sequence[Path], path: Path) -> Shards:
    """The token ids of a column of lists."""
    key = {"files": list(identity_of_files(files)), "column": section.text_field, "end_token": section.end_token}
    stream, found = cached_tokens(
        cache_folder(section.cache, "tokens"),
        key,
        lambda: _with_end(token_rows(files, section.text_field), section.end_token),
        dtype="uint32",
        what=str(path),
    )
    origin = f"{_origin(found, section.text_field, path)}, token ids up to {found.vocabulary - 1:,}"
    return Shards([stream], found.vocabulary, origin)


def encoded(documents: Iterator[bytes], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Tokenize some documents at a time."""
    while some := list(islice(documents, DOCUMENTS_AT_ONCE)):
        yield tokenizer.encode(some), len(some)


def dtype_of(tokenizer: Tokenizer) -> str:
    """The smaller dtype that has all token ids."""
    return "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"


def identity(section: DataSection) -> str:
    """A hash of the files of `data.tokenizer`; bytes have none."""
    if section.tokenizer in ("bytes", "auto"):
        return "bytes"
    path = Path(section.tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    beside = file.with_name("tokenizer_config.json")
    state = hashlib.blake2b(file.read_bytes(), digest_size=16)
    state.update(beside.read_bytes() if beside.is_file() else b"")  # it may name the end token
    return state.hexdigest()


def _with_end(rows: Iterator[Tokens], end_token: int | None) -> Iterator[Encoded]:
    for row in rows:
        has_end = end_token is None or row[-1] == end_token
        yield row if has_end else np.append(row, end_token), 1


def _origin(found: Description, column: str, path: Path) -> str:
    if not found.tokens:
        raise ShoalError(
            f"{path} has no row with text or token ids in {column!r}", fix="--data.text_field COLUMN", code="D007"
        )
    size = megabytes(found.tokens * np.dtype(found.dtype).itemsize)
    return f"{found.documents:,} rows of {column!r} in {path}, {size} of tokens"
