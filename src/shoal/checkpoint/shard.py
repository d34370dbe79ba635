"""One file of a checkpoint: tensors in the form of safetensors, written and read with a hash of every chunk.

The form is that of the safetensors package, which reads these files as they are: eight bytes with the length of a JSON
header, the header, and the values one after the other. Values are hashed on their way to the disk, so that nothing is
read twice; a reader hashes each chunk that it touches, once, and hands out nothing of one that differs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shoal.checkpoint.disk import Disk
from shoal.checkpoint.manifest import CHUNK, SIZES, File
from shoal.errors import ShoalError

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MOST_HEADER = 100 * 2**20
"""Bytes of a header; the safetensors package has the same limit."""


def write(path: Path, tensors: Mapping[str, Tensor], disk: Disk) -> File:
    """Write tensors to a new file, to the disk; returns its size and hashes."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashing = _Hashing()
    file = disk.create(path)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    for data in itertools.chain([head], map(bytes_of, tensors.values())):
        for begin in range(0, len(data), CHUNK):
            part = data[begin : begin + CHUNK]
            hashing.add(part)
            disk.write(file, part)
    disk.close(file)
    return hashing.file()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, as they lie there."""
    plain = tensor.detach().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


class _Hashing:
    """The hashes of a file that is being written."""

    def __init__(self) -> None:
        self.size = 0
        self.hashes: list[str] = []
        self._open = hashlib.sha256()

    def add(self, data: memoryview) -> None:
        while data:
            room = CHUNK - self.size % CHUNK
            self._open.update(data[:room])
            self.size += min(room, len(data))
            data = data[room:]
            if self.size % CHUNK == 0:
                self._turn()

    def _turn(self) -> None:
        self.hashes.append(self._open.hexdigest())
        self._open = hashlib.sha256()

    def file(self) -> File:
        if self.size % CHUNK:
            self._turn()
        return File(self.size, tuple(self.hashes))


class Reader:
    """A file of a checkpoint, of which nothing is handed out that does not have its hash."""

    def __init__(self, path: Path, file: File) -> None:
        self.path, self.file = path, file
        self._number, self._chunk = -1, b""
        self._verified: set[int] = set()
        self._begin = 0
        self.header: dict[str, Any] = {}
        try:
            self._handle: BinaryIO = path.open("rb")
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> None:
        size = self.path.stat().st_size
        if size != self.file.size:
            raise _damaged(self.path, f"has {size:,} bytes, and the manifest says {self.file.size:,}")
        length = int.from_bytes(self.part(0, 8), "little")
        if length > min(MOST_HEADER, size - 8):
            raise _damaged(self.path, f"says that its header has {length:,} bytes")
        header = json.loads(self.part(8, length))
        self._begin, self.header = 8 + length, header

    def part(self, begin: int, size: int) -> bytes:
        """A part of the file; every chunk of it has been checked."""
        parts = []
        while size > 0:
            number, at = divmod(begin, CHUNK)
            part = self._of(number)[at : at + size]
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return b"".join(parts)

    def _of(self, number: int) -> bytes:
        if number != self._number:
            self._handle.seek(number * CHUNK)
            chunk = self._handle.read(CHUNK)
            if number not in self._verified and hashlib.sha256(chunk).hexdigest() != self.file.hashes[number]:
                place = f"bytes {number * CHUNK:,} to {number * CHUNK + len(chunk):,}"
                raise _damaged(self.path, f"{place} are not those that were written{self._held(number)}")
            self._verified.add(number)
            self._number, self._chunk = number, chunk
        return self._chunk

    def _held(self, number: int) -> str:
        """Which tensors lie in a chunk, as far as the header is known to be right."""
        begin, end = number * CHUNK, (number + 1) * CHUNK
        held = [
            key
            for key, entry in self.header.items()
            if entry["data_offsets"][0] + self._begin < end and entry["data_offsets"][1] + self._begin > begin
        ]
        return f": they hold {', '.join(held[:3])}{' and more' * (len(held) > 3)}" if held else ""

    def rows(self, key: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> Tensor:
        """Rows of a tensor, or all of a tensor without dims. What the manifest says of it has to be what is there."""
        entry = self.header.get(key)
        if entry is None or entry["dtype"] != dtype or list(entry["shape"]) != list(shape):
            found = "nothing" if entry is None else f"{entry['dtype']} {entry['shape']}"
            raise _damaged(self.path, f"has {found} under {key!r}, and the manifest says {dtype} {list(shape)}")
        total = entry["data_offsets"][1] - entry["data_offsets"][0]
        row = total // shape[0] if len(shape) and shape[0] else 0
        first = self._begin + entry["data_offsets"][0] + (begin * row if len(shape) else 0)
        size = (end - begin) * row if len(shape) else total
        data = bytearray(self.part(first, size))
        wanted = ((end - begin), *shape[1:]) if len(shape) else ()
        if not data:
            return torch.empty(wanted, dtype=DTYPES[dtype])
        assert len(data) % SIZES[dtype] == 0
        return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]).view(wanted)

    def close(self) -> None:
        """Let go of the file."""
        self._handle.close()


def _damaged(path: Path, what: str) -> ShoalError:
    return ShoalError(f"{path.parent.name}/{path.name} {what}", fix="load the checkpoint before it: --resume STEP")
