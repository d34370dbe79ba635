"""Foreign safetensors files: written header first and then box by box, read by rows.

These have no manifest and no hashes. So the header is checked: the values of every tensor are inside of the file, have
the size that dtype and shape imply, and no two tensors share a byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shoal.checkpoint.formats.lazy_tensor import LazyTensor, by_rows
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import MOST_DIMS, MOST_ELEMENTS, SIZES, Shape
from shoal.checkpoint.storage.shard_file import DTYPES, MOST_HEADER, bytes_of
from shoal.errors import ShoalError
from shoal.files import opened

Places = dict[str, tuple[str, Shape, int, int]]
"""Key → dtype, shape, and the range of its bytes in the file."""


def write(
    path: Path, tensors: Mapping[str, LazyTensor], disk: Filesystem, progress: Callable[[int], None], **metadata: str
) -> Places:
    """Write tensors to a new file, a box at a time; return their places. Those with wide elements come first, so that
    all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -SIZES[item[1].dtype])
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.num_bytes
        header[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path, disk) as file:
        disk.write(file, len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for box in tensor.boxes:
                data = bytes_of(box.read())
                disk.write(file, data)
                progress(len(data))
    return _places(path, header, 8 + len(text), 8 + len(text) + end)


@contextmanager
def new_file(path: Path, disk: Filesystem) -> Iterator[Any]:
    """Yield a new file, which is on the disk in the end."""
    file = disk.create(path)
    try:
        yield file
    except BaseException:
        disk.give_up(file)
        raise
    disk.close(file)


def read(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file, to be read by rows."""
    return {
        key: by_rows(dtype, shape, partial(_rows, path, dtype, shape, begin))
        for key, (dtype, shape, begin, _) in places(path).items()
    }


def places(path: Path) -> Places:
    """Return the places of the tensors of a file."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MOST_HEADER, size - 8):
                raise _wrong(path, f"has a header of {length:,} bytes, and the file has {size:,} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}", fix=f"chmod u+r {path}", code="C034") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ShoalError):
            raise
        raise _wrong(path, f"has a header that is not JSON: {error}") from None
    return _places(path, header, 8 + length, size)


def _places(path: Path, header: Any, start: int, size: int) -> Places:
    if not isinstance(header, dict):
        raise _wrong(path, "has a header that is not a JSON object")
    found = {key: _place(path, key, entry, start, size) for key, entry in header.items() if key != "__metadata__"}
    last = start
    for key, (_, _, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin < last:
            raise _wrong(path, f"has values of {key[:200]!r} that overlap others")
        last = end
    return found


def _place(path: Path, key: str, entry: Any, start: int, size: int) -> tuple[str, Shape, int, int]:
    said: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (said.get(word) for word in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise _wrong(path, f"gives {key[:200]!r} the dtype {str(dtype)[:40]!r}; supported are {', '.join(SIZES)}")
    if not _numbers(shape) or len(shape) > MOST_DIMS or prod(length or 1 for length in shape) > MOST_ELEMENTS:
        raise _wrong(path, f"gives {key[:200]!r} the shape {str(shape)[:80]}")
    wanted = prod(shape) * SIZES[dtype]
    if _numbers(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == wanted and offsets[1] > size - start:
        raise _wrong(
            path, f"is cut off: {key[:200]!r} ends at byte {start + offsets[1]:,}, and the file has {size:,} bytes"
        )
    if not _numbers(offsets) or len(offsets) != 2 or offsets[1] > size - start or offsets[1] - offsets[0] != wanted:
        raise _wrong(path, f"puts the {wanted:,} bytes of {key[:200]!r} at {str(offsets)[:80]} of {size - start:,}")
    return dtype, tuple(shape), start + offsets[0], start + offsets[1]


def _numbers(found: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(found, list | tuple) and all(type(one) is int and one >= 0 for one in found)


def _rows(path: Path, dtype: str, shape: Shape, start: int, begin: int, end: int) -> Tensor:
    row = prod(shape[1:]) * SIZES[dtype]
    wanted = (end - begin, *shape[1:]) if shape else ()
    data = bytearray((end - begin) * row)
    with opened(path) as file:
        file.seek(start + begin * row)
        if file.readinto(data) != len(data):
            raise _wrong(path, "has become shorter")
    return (
        torch.frombuffer(data, dtype=DTYPES[dtype]).view(wanted) if data else torch.empty(wanted, dtype=DTYPES[dtype])
    )


def _wrong(path: Path, what: str) -> ShoalError:
    return ShoalError(
        f"{path} {what}", fix=f"cp ORIGINAL {path}, since this file is damaged or not safetensors", code="C049"
    )
