"""The manifest of a checkpoint: one JSON file that lists the tensors, the places of their pieces, and the hash of every
chunk of every file.

    step-00000120/
      manifest.json                       written last
      shard-00000.safetensors ...         one file per rank that has something to save

torch's checkpoints store this in a pickle, which can run code, and have no hashes. This one is untrusted data, possibly
damaged or forged. Parsing yields a consistent manifest, or a `ShoalError` that names the entry. File names have no
paths, sizes are bounded before anything is allocated, and the pieces of a tensor fill it exactly, without gaps and
without overlaps.

The last check is one sum. A box is a difference of corners: its indicator has +1 and -1 where its edges begin and end.
Boxes fill another box exactly once if and only if their corners cancel to the corners of that box:

    ┌───┬─────┐     + - at every corner; inside, every + cancels a -
    │ a │  b  │
    ├───┴──┬──┤
    │  c   │ d│
    └──────┴──┘
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shoal.checkpoint.state.known_keys import wrong_in
from shoal.errors import ShoalError

FORMAT = "shoal checkpoint"
VERSION = 2
"""1 had other names in its state, which would be ignored."""
NAME = "manifest.json"
CHUNK = 4 * 2**20
"""Bytes of a file per hash, so that a part of it can be read and checked."""

MOST_BYTES = 256 * 2**20
"""Maximum size of a manifest: that of a model with a million tensors on a thousand ranks is smaller."""
MOST_DIMS = 8
MOST_ELEMENTS = 2**53
MOST_PARTS = 2**25
"""Maximum of brackets and commas: memory for the parsed manifest grows with them. A million tensors need fewer."""
DEEPEST = 64
"""Maximum levels of nesting."""

SIZES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""safetensors' name of a dtype → bytes per element."""

Shape = tuple[int, ...]
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the place of its values."""

    file: str
    key: str
    """Its name in the file."""
    begin: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class File:
    """One file, and the SHA-256 of each of its chunks."""

    size: int
    hashes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a checkpoint but the values."""

    step: int
    tensors: Mapping[str, Entry]
    files: Mapping[str, File]
    state: Mapping[str, Any] = field(default_factory=dict)
    """State that is not a tensor: the position in the data, seeds, the recipe, the layout. JSON."""

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        said = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "state": self.state,
            "files": {
                name: {"bytes": file.size, "chunk_bytes": CHUNK, "sha256": file.hashes}
                for name, file in self.files.items()
            },
            "tensors": {
                name: {
                    "dtype": entry.dtype,
                    "shape": entry.shape,
                    "pieces": [
                        {"file": piece.file, "key": piece.key, "begin": piece.begin, "shape": piece.shape}
                        for piece in entry.pieces
                    ],
                }
                for name, entry in self.tensors.items()
            },
        }
        return with_checksum(json.dumps(said, allow_nan=False, separators=(",", ":")).encode())

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Parse untrusted text; raise if anything in it is invalid."""
        if len(text) > MOST_BYTES:
            raise _wrong(f"has {len(text):,} bytes", f"at most {MOST_BYTES:,}")
        try:
            tree = _Reader("", read_json(text))
        except ShoalError:
            raise
        except ValueError as error:  # UnicodeDecodeError is one
            raise _wrong(f"is not JSON: {error}", "the file that was written") from None
        if tree.text("format") != FORMAT:
            raise _wrong(f"is of the format {tree.value['format']!r}", f"a manifest of the format {FORMAT!r}")
        if tree.number("version") != VERSION:
            raise _wrong(f"is of version {tree.value['version']}", f"a shoal that reads it; this one reads {VERSION}")
        files = {name: _file(name, entry) for name, entry in tree.mapping("files").items()}
        tensors = {name: _entry(entry, files) for name, entry in tree.mapping("tensors").items()}
        read = cls(step=tree.number("step"), tensors=tensors, files=files, state=tree.mapping("state").value)
        if (name := wrong_in(read.state)) is not None:
            raise _wrong(f"has an invalid value in its state under {name!r}", "the saved state")
        if text != with_checksum(text):  # last: the other checks say more about what is wrong
            raise _wrong("does not match the hash at its end", "the file that was written")
        return read


_SEAL = re.compile(rb',\s*"sha256":\s*"[0-9a-f]{64}"\s*}\s*\Z')


def with_checksum(text: bytes) -> bytes:
    """Return a manifest with the hash of what precedes it as its last key, in place of an existing one.

    >>> once = with_checksum(b'{"step":1}')
    >>> once[:21], with_checksum(once) == once
    (b'{"step":1,"sha256":"d', True)
    """
    body = _SEAL.sub(b"", text) if _SEAL.search(text) else text.rstrip()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def tiles(shape: Shape, boxes: Iterable[tuple[Shape, Shape]]) -> bool:
    """Whether boxes, each with its begin and its shape, fill a shape exactly: the corners cancel.

    >>> tiles((2, 3), [((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 1), (1, 2))])
    True
    >>> tiles((4,), [((0,), (3,)), ((2,), (2,))])
    False
    """
    corners: defaultdict[Shape, int] = defaultdict(int)
    full = ((0,) * len(shape), shape)
    for sign, (begin, size) in itertools.chain([(-1, full)], ((1, box) for box in boxes)):
        for upper in itertools.product((0, 1), repeat=len(shape)):
            place = tuple(b + s * u for b, s, u in zip(begin, size, upper, strict=True))
            corners[place] += sign * (-1) ** sum(upper)
    return not any(corners.values())


# ---- reading --------------------------------------------------------------------------------------------------------


def _file(name: str, said: _Reader) -> File:
    if not _FILE.fullmatch(name):
        raise _wrong(f"names a file {name[:80]!r}", "a plain name, without a path")
    size, chunk = said.number("bytes"), said.number("chunk_bytes")
    if chunk != CHUNK:
        raise _wrong(f"hashes {name!r} in chunks of {chunk} bytes", f"chunks of {CHUNK}")
    hashes = said.list("sha256")
    if len(hashes) != -(-size // CHUNK):
        raise _wrong(f"has {len(hashes)} hashes for the {size} bytes of {name!r}", f"{-(-size // CHUNK)}")
    if not all(isinstance(one, str) and _HASH.fullmatch(one) for one in hashes):
        raise _wrong(f"has an invalid hash of {name!r}", "64 hexadecimal digits")
    return File(size, tuple(hashes))


def _entry(said: _Reader, files: Mapping[str, File]) -> Entry:
    dtype, shape = said.text("dtype"), said.shape("shape")
    if dtype not in SIZES:
        raise _wrong(f"gives {said.place} the dtype {dtype[:40]!r}", f"one of {', '.join(SIZES)}")
    pieces = tuple(_piece(_Reader(f"{said.place}: a piece", one), len(shape), files) for one in said.list("pieces"))
    for piece in pieces:
        needed, size = prod(piece.shape) * SIZES[dtype], files[piece.file].size
        if needed > size:
            raise _wrong(f"puts {needed} bytes of {said.place} into {piece.file!r}, which has {size}", "a larger file")
    if not tiles(shape, ((piece.begin, piece.shape) for piece in pieces)):
        raise _wrong(f"has pieces of {said.place} that do not fill its shape {list(shape)} exactly once", "all of it")
    return Entry(dtype, shape, pieces)


def _piece(said: _Reader, num_dims: int, files: Mapping[str, File]) -> Piece:
    piece = Piece(said.text("file"), said.text("key"), said.shape("begin"), said.shape("shape"))
    if piece.file not in files:
        raise _wrong(
            f"puts {said.place} into the file {piece.file[:80]!r}, which it does not list", "a file of its own"
        )
    if not len(piece.begin) == len(piece.shape) == num_dims:
        raise _wrong(f"gives {said.place} another number of dims than its tensor", f"{num_dims}")
    return piece


class _Reader:
    """Untrusted keys and values, read with a type."""

    def __init__(self, place: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(f"has no keys and values at {place or 'the top'}", "keys and values")
        self.place, self.value = place, value

    def _get(self, key: str, kind: type[Any], what: str) -> Any:
        found = self.value.get(key)
        if type(found) is not kind:
            raise _wrong(f"has no {key!r} at {self.place or 'the top'} that is {what}", what)
        return found

    def text(self, key: str) -> str:
        found: str = self._get(key, str, "a text")
        return found

    def number(self, key: str) -> int:
        found: int = self._get(key, int, "an integer")
        if not 0 <= found <= MOST_ELEMENTS:
            raise _wrong(f"has {key}={found} at {self.place or 'the top'}", f"0 to {MOST_ELEMENTS}")
        return found

    def list(self, key: str) -> list[Any]:
        found: list[Any] = self._get(key, list, "a list")
        return found

    def mapping(self, key: str) -> _Mapping:
        return _Mapping(f"{self.place}{key}", self._get(key, dict, "keys and values"))

    def shape(self, key: str) -> Shape:
        found = self.list(key)
        if len(found) > MOST_DIMS or not all(type(size) is int and 0 <= size <= MOST_ELEMENTS for size in found):
            raise _wrong(f"gives {self.place} the {key} {str(found)[:80]}", f"up to {MOST_DIMS} integers of 0 or more")
        if (
            prod(size or 1 for size in found) > MOST_ELEMENTS
        ):  # a size of 0 does not excuse the others: strides overflow
            raise _wrong(f"gives {self.place} the {key} {found}: too many elements", "a smaller one")
        return tuple(found)


class _Mapping(_Reader):
    def items(self) -> Iterable[tuple[str, _Reader]]:
        return ((name, _Reader(repr(name[:200]), value)) for name, value in self.value.items())


def read_json(text: bytes) -> Any:
    """Parse JSON that has no more parts than a checkpoint needs, is not too deep, and has no duplicate keys. Raise
    `ValueError` before it costs more than a multiple of the input."""
    if sum(map(text.count, (b"[", b"{", b","))) > MOST_PARTS:
        raise ValueError(f"more than {MOST_PARTS:,} parts")
    if _depth(text) > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _depth(text: bytes) -> int:
    """Return the nesting depth of brackets, without building anything; brackets inside of strings count too."""
    depth = deepest = 0
    for match in re.finditer(rb"[\[{]+|[\]}]+", text):
        size = match.end() - match.start()
        depth += size if match[0][:1] in b"[{" else -size
        deepest = max(deepest, depth)
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    "".join(found).encode()  # raises for a name with half of a surrogate pair, which cannot be printed
    return found


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text)


def _no_constant(word: str) -> Any:
    raise ValueError(f"a number is {word[:40]}")


def _wrong(what: str, wanted: str) -> ShoalError:
    return ShoalError(
        f"the manifest {what}", fix=f"expected {wanted}; load another checkpoint, this one is damaged", code="C006"
    )
