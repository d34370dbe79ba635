"""One file of a checkpoint: tensors in safetensors format, written and read with a hash of every chunk.

The safetensors package reads these files: eight bytes with the length of a JSON header, the header, and the values one
after the other. Chunks are hashed while they are written, so that nothing is read twice. A reader hashes each chunk
that it reads, in several threads, in the memory that it was read into if the full chunk is there. If a chunk differs,
the caller must discard all that was read.

A header is untrusted data, possibly damaged or forged, as a manifest is. Every tensor must be at the place that dtypes
and shapes imply, one after the other, from the first byte to the last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import CHUNK, MOST_DIMS, MOST_ELEMENTS, SIZES, File, read_json
from shoal.errors import ShoalError

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MOST_HEADER = 100 * 2**20
"""Maximum bytes of a header; the safetensors package has the same limit."""
THREADS = 4
"""Threads that hash what is written: one hashes 1 to 2 GB a second."""
AHEAD = 8
"""Chunks that may wait to be hashed, and so stay in memory, while later ones are written."""
BLOCK = 16 * CHUNK
"""Bytes that are read at a time if they cannot be read directly to their target."""


def write(path: Path, tensors: Mapping[str, Tensor], disk: Filesystem) -> File:
    """Write tensors to a new file, durably; return its size and hashes."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    hashes: list[Future[str]] = []
    file = disk.create(path, len(head) + end)
    try:
        with ThreadPoolExecutor(THREADS, "shoal-hash") as pool:
            for chunk in _chunks(itertools.chain([head], map(bytes_of, tensors.values()))):
                hashes.append(pool.submit(_sha256, chunk))
                disk.write(file, *chunk)
                if len(hashes) > AHEAD:
                    hashes[-AHEAD].result()
    except BaseException:
        disk.give_up(file)
        raise
    disk.close(file)
    return File(len(head) + end, tuple(one.result() for one in hashes))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory."""
    plain = tensor.detach().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def _chunks(stream: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut a stream of bytes into the chunks of a file: lists of parts, without a copy."""
    chunk: list[memoryview] = []
    room = CHUNK
    for data in stream:
        while data:
            chunk.append(data[:room])
            room, data = room - len(chunk[-1]), data[room:]
            if not room:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk


def _sha256(parts: Iterable[memoryview]) -> str:
    hashing = hashlib.sha256()
    for part in parts:
        hashing.update(part)
    return hashing.hexdigest()


class Reading:
    """State that the readers of several files share: threads, and a cache of recently read chunks."""

    def __init__(self, most_chunks: int = 16, *, at_once: int = Filesystem.reads_at_once) -> None:
        self.most_chunks = most_chunks
        self.threads = ThreadPoolExecutor(at_once, "shoal-read")
        self._kept: OrderedDict[tuple[Path, int], Future[memoryview]] = OrderedDict()

    def keep(self, path: Path, number: int, chunk: Future[memoryview]) -> None:
        """Cache a chunk, and evict the least recently used one."""
        self._kept[path, number] = chunk
        if len(self._kept) > self.most_chunks:
            self._kept.popitem(last=False)

    def kept(self, path: Path, number: int) -> Future[memoryview] | None:
        """Return a chunk that is cached, or being read."""
        if found := self._kept.get((path, number)):
            self._kept.move_to_end((path, number))
        return found

    def close(self) -> None:
        """End the threads when they are done."""
        self.threads.shutdown()
        self._kept.clear()


class Reader:
    """A file of a checkpoint; only bytes with the right hash are returned. For one thread."""

    def __init__(
        self,
        path: Path,
        file: File,
        *,
        disk: Filesystem | None = None,
        reading: Reading | None = None,
        verify: bool = True,
    ) -> None:
        """Open the file. `verify=False` is for measuring the cost of hashing."""
        self.path, self.file, self.verify = path, file, verify
        self.header: dict[str, Any] = {}
        self._begin = 0
        self._last = -1
        self._reading, self._is_alone = reading or Reading(), reading is None
        try:
            self._source = (disk or Filesystem()).open(path)
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror or error}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._is_alone:
            self._reading.close()
        self._source.close()

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def part(self, begin: int, size: int) -> bytes:
        """Return a part of the file; every chunk of it has been checked."""
        data = bytearray(size)
        self.read_into(begin, memoryview(data))
        return bytes(data)

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill memory with a part of the file; every chunk of it has been checked when this returns."""
        assert 0 <= begin <= begin + len(view) <= self.file.size
        straight: list[Future[None]] = []
        through: list[tuple[Future[memoryview], int, memoryview]] = []
        # After a long read, the next one is probably long: better as one request than by chunks.
        is_ahead = len(view) < CHUNK or self._source.block <= CHUNK
        while view:
            number, at = divmod(begin, CHUNK)
            if size := 0 if at else self._whole_chunks(number, len(view)):
                straight.append(self._reading.threads.submit(self._read_chunks, number, view[:size]))
            else:
                size = min(self._size_of(number) - at, len(view))
                through.append((self._chunk(number, is_ahead), at, view[:size]))
            begin, view = begin + size, view[size:]
            self._last = (begin - 1) // CHUNK
        wait(straight)  # for all: none may write to this memory after another one has failed
        for done in straight:
            done.result()
        for chunk, at, part in through:
            part[:] = chunk.result()[at : at + len(part)]

    def _size_of(self, number: int) -> int:
        return min(CHUNK, self.file.size - number * CHUNK)

    def _whole_chunks(self, number: int, room: int) -> int:
        """Return the bytes of the chunks from one on that are read at a time, directly to their target."""
        size = 0
        for each in range(number, min(number + self._source.block // CHUNK, len(self.file.hashes))):
            if size + self._size_of(each) > room or self._reading.kept(self.path, each):
                break
            size += self._size_of(each)
        return size

    def _chunk(self, number: int, is_ahead: bool) -> Future[memoryview]:
        """Read a chunk of which a part is needed; cache the rest, and prefetch the next chunk if `is_ahead`."""
        if is_ahead and number == self._last + 1 and (number + 1) * CHUNK < self.file.size:
            self._fetch(number + 1)
        return self._fetch(number)

    def _fetch(self, number: int) -> Future[memoryview]:
        chunk = self._reading.kept(self.path, number)
        if chunk is None:
            chunk = self._reading.threads.submit(self._new_chunk, number)
            self._reading.keep(self.path, number, chunk)
        return chunk

    def _new_chunk(self, number: int) -> memoryview:
        view = memoryview(bytearray(self._size_of(number)))
        self._read_chunks(number, view)
        return view

    def _read_chunks(self, first: int, view: memoryview) -> None:
        """Fill memory with whole chunks, from one on, and check each."""
        begin = first * CHUNK
        try:
            count = self._source.read_into(begin, view)
        except OSError as error:
            place = f"bytes {begin:,} to {begin + len(view):,}"
            raise _damaged(self.path, f"{place} cannot be read: {error.strerror or error}") from error
        for number, at in enumerate(range(0, len(view), CHUNK), first):
            chunk = view[at : at + CHUNK]
            is_cut = count < at + len(chunk)
            if is_cut or (self.verify and hashlib.sha256(chunk).hexdigest() != self.file.hashes[number]):
                place = f"bytes {begin + at:,} to {begin + at + len(chunk):,}"
                raise _damaged(self.path, f"{place} differ from what was written{self._tensors_in(number)}")

    def _tensors_in(self, number: int) -> str:
        """Return the tensors in a chunk, as far as the header is known to be right."""
        begin, end = number * CHUNK - self._begin, (number + 1) * CHUNK - self._begin
        names = [
            key
            for key, entry in self.header.items()
            if entry["data_offsets"][0] < end and entry["data_offsets"][1] > begin
        ]
        return f": they hold {', '.join(names[:3])}{' and more' * (len(names) > 3)}" if names else ""

    # ---- header ------------------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        size = self._source.size
        if size != self.file.size:
            raise _damaged(self.path, f"has {size:,} bytes, and the manifest lists {self.file.size:,}")
        length = int.from_bytes(self.part(0, min(8, size)), "little")
        if size < 8 or length > min(MOST_HEADER, size - 8):
            raise _damaged(self.path, f"has a header of {length:,} bytes, more than the file")
        try:
            header = _header(self.part(8, length), size - 8 - length)
        except ValueError as error:
            if isinstance(error, ShoalError):
                raise
            raise _damaged(self.path, f"has an invalid header: {error}") from error
        self._begin, self.header = 8 + length, header

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def rows(self, key: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> Tensor:
        """Return rows of a tensor, or all of one without dims. The header must match the manifest's dtype and shape."""
        entry = self._entry(key, dtype, shape)
        assert not shape or 0 <= begin <= end <= shape[0]
        wanted = ((end - begin), *shape[1:]) if len(shape) else ()
        values = torch.empty(wanted, dtype=DTYPES[dtype])
        self._read_rows(values, entry, begin if len(shape) else 0)
        return values

    def fill(self, target: Tensor, key: str, dtype: str, shape: Sequence[int], part: Sequence[slice]) -> None:
        """Copy a part of a tensor to its target; directly, if the memory layouts match."""
        entry = self._entry(key, dtype, shape)
        first = part[0] if part else slice(0, 1)
        is_rows = all(one == slice(0, size) for one, size in zip(part[1:], shape[1:], strict=True))
        is_plain = target.device.type == "cpu" and target.dtype == DTYPES[dtype] and target.is_contiguous()
        if is_rows and is_plain:
            self._read_rows(target, entry, first.start)
            return
        if not part:
            target.copy_(self.rows(key, dtype, shape, 0, 1))
            return
        row_bytes = prod(shape[1:]) * SIZES[dtype]
        count = max(1, BLOCK // max(1, row_bytes))
        for begin in range(first.start, first.stop, count):
            end = min(begin + count, first.stop)
            block = self.rows(key, dtype, shape, begin, end)
            target[begin - first.start : end - first.start].copy_(block[(slice(None), *part[1:])])

    def _read_rows(self, target: Tensor, entry: Mapping[str, Any], begin: int) -> None:
        """Read rows from `begin` on into memory that they fill."""
        if target.numel():
            row_bytes = prod(entry["shape"][1:]) * SIZES[entry["dtype"]]
            place = self._begin + entry["data_offsets"][0] + begin * row_bytes
            self.read_into(place, target.detach().flatten().view(torch.uint8).numpy().data)

    def _entry(self, key: str, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
        entry: dict[str, Any] | None = self.header.get(key)
        if entry is None or entry["dtype"] != dtype or list(entry["shape"]) != list(shape):
            found = "nothing" if entry is None else f"{entry['dtype']} {entry['shape']}"
            raise _damaged(self.path, f"has {found} under {key!r}, and the manifest lists {dtype} {list(shape)}")
        return entry


def _header(text: bytes, size: int) -> dict[str, Any]:
    """Return the tensors of a header, if they are contiguous and fill `size` bytes; raise `ValueError` otherwise."""
    tree = read_json(text)
    if not isinstance(tree, dict):
        raise ValueError("no keys and values")
    tree.pop("__metadata__", None)  # of the safetensors package; ours is empty
    found = sorted((_offsets(key, entry), key) for key, entry in tree.items())
    place = 0
    for (begin, end), key in found:
        if begin != place:
            raise ValueError(f"{key[:200]!r} begins at {begin}, and the previous tensor ends at {place}")
        place = end
    if place != size:
        raise ValueError(f"its tensors have {place:,} bytes, and the file has {size:,}")
    return tree


def _offsets(key: str, entry: Any) -> tuple[int, int]:
    """Return the place of a tensor, if it is valid."""
    name = repr(key[:200])
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ValueError(f"{name} has the dtype {str(dtype)[:40]!r}")
    if not _are_numbers(shape) or len(shape) > MOST_DIMS or prod(size or 1 for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"{name} has the shape {str(shape)[:80]}")
    if not _are_numbers(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * SIZES[dtype]:
        raise ValueError(f"{name} is at {str(offsets)[:80]}, with {prod(shape) * SIZES[dtype]} bytes")
    return offsets[0], offsets[1]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and 0 <= one <= MOST_ELEMENTS for one in values)


def _damaged(path: Path, what: str) -> ShoalError:
    return ShoalError(
        f"{path.parent.name}/{path.name} {what}",
        fix="an earlier step: --resume STEP, --step N, or run.load(directory, step=N)",
        code="C008",
    )
