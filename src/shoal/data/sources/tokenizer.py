"""Tokenize text: by bytes, without a package, or by a Hugging Face tokenizer.json.

Both end every document with an end token, which separates documents in packed samples. A document begins with the
tokens that the tokenizer itself puts before a text: BOS in models such as Llama and Gemma, nothing in most others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.data.sources.digest import Tokens
from shoal.data.sources.files import existing, reject_irregular
from shoal.errors import ShoalError, needs
from shoal.files import read_regular

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
MOST_CONFIG = 2**24
DOCUMENTS_AT_ONCE = 1024  # bounds the memory of encodings, which are far larger than their ids


class Tokenizer(Protocol):
    """Turns documents into one stream of ids."""

    vocabulary: int
    end_token: int
    begin_tokens: tuple[int, ...]
    """Tokens before each document."""

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """All documents one after the other, each after the begin tokens and followed by the end token."""

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without those around it."""

    def around(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around one."""

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens."""


class Bytes:
    """Every byte is a token: ids 0 to 255, and 256 ends a document."""

    vocabulary = 257
    end_token = 256
    begin_tokens: tuple[int, ...] = ()

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Copy the bytes side by side."""
        stream = np.empty(sum(map(len, documents)) + len(documents), dtype=np.uint16)
        position = 0
        for document in documents:
            stream[position : position + len(document)] = np.frombuffer(document, dtype=np.uint8)
            position += len(document) + 1
            stream[position - 1] = self.end_token
        return stream

    def ids(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode("utf-8", errors="replace"))

    def around(self, text: str) -> list[int]:
        """The bytes of a text, and the end token."""
        return [*self.ids(text), self.end_token]

    def text(self, ids: Sequence[int]) -> str:
        """The text of bytes; others than bytes are left out."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or a folder with one. Without a known end token, one id is added after its last."""

    def __init__(self, path: str) -> None:
        tokenizers = needs("tokenizers", what="data.tokenizer", extra="hf")
        file = existing(path, words=["bytes"], setting="data.tokenizer")
        file = file / "tokenizer.json" if file.is_dir() else file
        reject_irregular(file)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exceptions
            what = f"data.tokenizer must be a tokenizer.json, got {file}: {error}"
            raise ShoalError(what, fix="--data.tokenizer PATH/tokenizer.json", code="D020") from error
        self._tokenizer.no_truncation()  # a file may say both, for batches of another program
        self._tokenizer.no_padding()
        size = int(self._tokenizer.get_vocab_size())
        known = [self._tokenizer.token_to_id(token) for token in (*_end_tokens_beside(file), *END_TOKENS)]
        self.end_token = next((number for number in known if number is not None), size)
        self.vocabulary = max(size, self.end_token + 1)
        self.begin_tokens = self._begin_tokens()

    def _begin_tokens(self) -> tuple[int, ...]:
        """The tokens that the post-processor puts before a text."""
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        added = takewhile(lambda pair: pair[1], zip(whole.ids, whole.special_tokens_mask, strict=True))
        return tuple(token for token, _ in added)

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Encode some documents at a time."""
        parts: list[Tokens] = []
        for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
            some = documents[start : start + DOCUMENTS_AT_ONCE]
            texts = [document.decode("utf-8", errors="replace") for document in some]
            for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
                parts.append(np.array([*begun(encoding.ids, self.begin_tokens), self.end_token], dtype=np.uint32))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without special ones around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def around(self, text: str) -> list[int]:
        """The tokens of a text, with special ones around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def begun(tokens: list[int], begin_tokens: tuple[int, ...]) -> list[int]:
    """Tokens after the begin tokens, which a text may have already."""
    has_them = tuple(tokens[: len(begin_tokens)]) == begin_tokens
    return tokens if has_them else [*begin_tokens, *tokens]


def _end_tokens_beside(file: Path) -> Iterator[str]:
    """The end token that the tokenizer_config.json in the same folder names."""
    beside = file.with_name("tokenizer_config.json")
    if not beside.is_file():
        return
    try:
        data = read_regular(beside, MOST_CONFIG)
        said = json.loads(data) if len(data) <= MOST_CONFIG else None
    except (OSError, ValueError, RecursionError):
        return  # the tokenizer.json alone decides
    token = said.get("eos_token") if isinstance(said, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
        yield token


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json or of a folder with one."""
    return Bytes() if name in ("bytes", "auto") else HuggingFaceTokenizer(name)
