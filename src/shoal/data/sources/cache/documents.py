"""Tokenize documents into the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.recipe import DataSection
from shoal.data.sources.cache.folder import cache_folder
from shoal.data.sources.cache.tokens import Description, Encoded, cached_tokens
from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import megabytes
from shoal.data.sources.tokenizer import DOCUMENTS_AT_ONCE, Tokenizer
from shoal.errors import ShoalError


def cached_documents(
    section: DataSection,
    tokenizer: Tokenizer,
    identity: Mapping[str, Any],
    documents: Callable[[], Iterator[bytes]],
    *,
    what: str,
) -> tuple[Tokens, str]:
    """The tokens of documents, each with those around it, and their origin. `identity` decides the documents."""
    limit = section.streaming_tokens if str(section.source).startswith("hf:") else None
    key = {**identity, "column": section.text_field, "tokenizer": _identity(section), "limit": limit}
    key |= {"begin": tokenizer.begin_tokens} if tokenizer.begin_tokens else {}
    stream, found = cached_tokens(
        cache_folder(section.cache, "tokens"),
        key,
        lambda: _encoded(documents(), tokenizer, limit),
        dtype="uint16" if tokenizer.vocabulary <= 2**16 else "uint32",
        what=what,
    )
    return stream, origin_of(found, section.text_field, what)


def _encoded(documents: Iterator[bytes], tokenizer: Tokenizer, limit: int | None) -> Iterator[Encoded]:
    """Tokenize some documents at a time, up to a number of tokens."""
    left = limit
    while (left is None or left > 0) and (some := list(islice(documents, DOCUMENTS_AT_ONCE))):
        tokens = tokenizer.encode(some)[:left]
        left = None if left is None else left - len(tokens)
        yield tokens, len(some)


def _identity(section: DataSection) -> str:
    """A hash of the files of `data.tokenizer`; bytes have none."""
    if section.tokenizer in ("bytes", "auto"):
        return "bytes"
    path = Path(section.tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    beside = file.with_name("tokenizer_config.json")
    state = hashlib.blake2b(file.read_bytes(), digest_size=16)
    state.update(beside.read_bytes() if beside.is_file() else b"")  # it may name the end token
    return state.hexdigest()


def origin_of(found: Description, column: str, what: str) -> str:
    """The origin of cached tokens; raises if there are none."""
    if not found.tokens:
        raise ShoalError(
            f"{what} has no row with text or token ids in {column!r}", fix="--data.text_field COLUMN", code="D007"
        )
    size = megabytes(found.tokens * np.dtype(found.dtype).itemsize)
    return f"{found.documents:,} rows of {column!r} in {what}, {size} of tokens"
