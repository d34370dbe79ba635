"""Python objects as bytes for other ranks, never as a pickle: to load a pickle runs the code that it names.

Plain data (`comm.plain_data`) plus sets, bytes and NumPy's numbers and arrays, which metrics are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm import plain_data
from shoal.errors import ShoalError

_SET, _BYTES, _ARRAY = "\0set", "\0bytes", "\0array"
_GOOD, _BAD = 1, 0


def pack(obj: Any, label: str) -> Tensor:
    """Encode an object. If that is impossible, encode the reason, so that every rank can raise it."""
    try:
        data = bytes([_GOOD]) + plain_data.to_bytes(_apart(obj))
    except (TypeError, ValueError) as error:
        data = bytes([_BAD]) + plain_data.to_bytes(f"object {label!r} cannot be sent to other ranks: {error}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """Decode an object, or raise if a rank could not encode its own."""
    raw = data.numpy().tobytes()
    value = plain_data.from_bytes(raw[1:])
    if raw[0] != _GOOD:
        fix = "send dicts, lists, tuples and sets of numbers, text and tensors; pickles are not sent"
        raise ShoalError(str(value), fix=fix, code="H011")
    return _together(value)


def _apart(value: Any) -> Any:
    """Write what plain data lacks as a marked tuple."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return (_ARRAY, torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, bytes | bytearray):
        return (_BYTES, torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0))
    if isinstance(value, set | frozenset):
        return (_SET, [_apart(each) for each in sorted(value, key=repr)])
    if type(value) is list:
        return [_apart(each) for each in value]
    if type(value) is tuple:
        return tuple(_apart(each) for each in value)
    if isinstance(value, Mapping):
        return {_apart(key): _apart(each) for key, each in value.items()}
    return value


def _together(value: Any) -> Any:
    if type(value) is tuple and len(value) == 2 and value[0] in (_SET, _BYTES, _ARRAY):
        mark, content = value
        if mark == _SET:
            return set(map(_together, content))
        return content.numpy() if mark == _ARRAY else content.to(torch.uint8).numpy().tobytes()
    if type(value) is list:
        return [_together(each) for each in value]
    if type(value) is tuple:
        return tuple(_together(each) for each in value)
    if isinstance(value, dict):
        return {_together(key): _together(each) for key, each in value.items()}
    return value
