"""Encode plain data as bytes and decode it: the only form in which ranks exchange anything but tensors.

torch's object collectives send pickles, and loading a pickle runs the code that it names. A process that takes a rank's
place could run code on every other rank. Here a value is JSON followed by the raw bytes of its tensors. The receiver
accepts only numbers, text, containers, paths, CPU tensors and the dataclasses that it names.

    bytes 0..7    length of the JSON
    JSON          lists as they are; everything else that JSON lacks as an object of one tag:
                  {"d": [[key, value], ...]}   mapping        {"t": [...]}                    tuple
                  {"x": [dtype, shape, at]}    tensor         {"p": "..."}                    path
                  {"k": [name, {field: ...}]}  dataclass
    the rest      the bytes of the tensors; `at` counts from the end of the JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIMIT = 256 * 2**20
"""Maximum bytes of one value."""
_HEAD = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
    )
}


def to_bytes(value: Any, kinds: Sequence[type] = ()) -> bytes:
    """Encode a value. Raises TypeError for a type that cannot be sent, ValueError for more than `LIMIT` bytes."""
    blobs: list[bytes] = []
    text = json.dumps(_taken_apart(value, tuple(kinds), blobs), separators=(",", ":")).encode()
    data = b"".join([len(text).to_bytes(_HEAD, "big"), text, *blobs])
    if len(data) > LIMIT:
        raise ValueError(f"a value must have at most {LIMIT:,} bytes, got {len(data):,}")
    return data


def from_bytes(data: bytes | memoryview, kinds: Sequence[type] = ()) -> Any:
    """Decode a value; only dataclasses of `kinds` are created. Raises ValueError for anything that `to_bytes` cannot
    have written."""
    view = memoryview(data)
    length = int.from_bytes(view[:_HEAD], "big")
    if not _HEAD <= len(view) <= LIMIT or length > len(view) - _HEAD:
        raise ValueError(f"{len(view)} bytes cannot hold {length} bytes of JSON")
    body = view[_HEAD + length :]
    try:
        return _put_together(json.loads(bytes(view[_HEAD : _HEAD + length])), {k.__name__: k for k in kinds}, body)
    except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _taken_apart(value: Any, kinds: tuple[type, ...], blobs: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float):
        return value
    if type(value) is list:
        return [_taken_apart(one, kinds, blobs) for one in value]
    if type(value) in (tuple, torch.Size):
        return {"t": [_taken_apart(one, kinds, blobs) for one in value]}
    if isinstance(value, Mapping):
        return {"d": [[_taken_apart(part, kinds, blobs) for part in pair] for pair in value.items()]}
    if isinstance(value, Path):
        return {"p": str(value)}
    if type(value) in (Tensor, torch.nn.Parameter):
        return {"x": _tensor_apart(value, blobs)}
    if type(value) in kinds and is_dataclass(value):
        named = {field.name: _taken_apart(getattr(value, field.name), kinds, blobs) for field in fields(value)}
        return {"k": [type(value).__name__, named]}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} cannot be sent to other ranks")


def _tensor_apart(tensor: Tensor, blobs: list[bytes]) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be sent to other ranks")
    at = sum(map(len, blobs))
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    blobs.append(flat.view(torch.uint8).numpy().tobytes())
    return [name, list(tensor.shape), at]


def _put_together(encoded: Any, kinds: Mapping[str, type], body: memoryview) -> Any:
    if isinstance(encoded, list):
        return [_put_together(one, kinds, body) for one in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((tag, content),) = encoded.items()
    if tag == "t":
        return tuple(_put_together(one, kinds, body) for one in content)
    if tag == "d":
        return {_put_together(key, kinds, body): _put_together(one, kinds, body) for key, one in content}
    if tag == "p":
        return Path(content)
    if tag == "x":
        name, shape, at = content
        return _tensor_together(name, shape, at, body)
    if tag == "k":
        kind, named = kinds[content[0]], content[1]
        if named.keys() != {field.name for field in fields(kind)}:
            raise ValueError(f"{content[0]} does not have the fields {sorted(named)}")
        return kind(**{name: _put_together(one, kinds, body) for name, one in named.items()})
    raise ValueError(f"there is no tag {tag!r}")


def _tensor_together(name: str, shape: list[int], at: int, body: memoryview) -> Tensor:
    dtype = _DTYPES[name]
    if not all(type(size) is int and size >= 0 for size in (*shape, at)):
        raise ValueError(f"a tensor of shape {shape} at byte {at}")
    num_bytes = prod(shape) * dtype.itemsize
    if at + num_bytes > len(body):
        raise ValueError(f"a tensor of {num_bytes} bytes at byte {at} of {len(body)}")
    flat = (
        torch.frombuffer(bytearray(body[at : at + num_bytes]), dtype=dtype)
        if num_bytes
        else torch.empty(0, dtype=dtype)
    )
    return flat.reshape(shape)
