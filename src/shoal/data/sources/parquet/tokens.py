"""Tokens of Parquet files, through the cache: of a column of text, or of a column with lists of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shoal.config.recipe import DataSection
from shoal.data.sources.cache.documents import cached_documents, origin_of
from shoal.data.sources.cache.folder import cache_folder
from shoal.data.sources.cache.tokens import Encoded, cached_tokens, identity_of_files
from shoal.data.sources.digest import Tokens
from shoal.data.sources.parquet.read import text_rows, token_rows
from shoal.data.sources.tokenizer import Tokenizer
from shoal.data.sources.tokens import Shards


def cached_text(section: DataSection, tokenizer: Tokenizer, files: Sequence[Path], path: Path) -> tuple[Tokens, str]:
    """The tokens of a column of text, and their origin. Each row is a document with an end token."""
    return cached_documents(
        section,
        tokenizer,
        {"files": list(identity_of_files(files))},
        lambda: text_rows(files, section.text_field),
        what=str(path),
    )


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
    origin = f"{origin_of(found, section.text_field, str(path))}, token ids up to {found.vocabulary - 1:,}"
    return Shards([stream], found.vocabulary, origin)


def _with_end(rows: Iterator[tuple[Tokens, Tokens]], end_token: int | None) -> Iterator[Encoded]:
    """Add the end token to each row that does not end with it."""
    for tokens, lengths in rows:
        if end_token is not None:
            ends = np.cumsum(lengths)
            tokens = np.insert(tokens.astype(np.int64), ends[tokens[ends - 1] != end_token], end_token)
        yield tokens, len(lengths)
