"""Plain data between ranks: every value comes back as it was, and nothing else can arrive."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm import plain_data


@dataclass(frozen=True)
class Known:
    name: str
    sizes: tuple[int, ...] = ()


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = plain_data.from_bytes(plain_data.to_bytes(value))
    assert repr(found) == repr(value)


def test_tensors_paths_and_known_dataclasses_come_back() -> None:
    tensors = [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ]
    value = {"tensors": tensors, "where": Path("/a/b"), "known": (Known("x", (1, 2)), None), "nan": float("nan")}
    found = plain_data.from_bytes(plain_data.to_bytes(value, [Known]), [Known])
    for before, after in zip(tensors, found["tensors"], strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        assert torch.equal(before, after)
    assert found["where"] == Path("/a/b")
    assert found["known"] == (Known("x", (1, 2)), None)
    assert found["nan"] != found["nan"]
    assert type(plain_data.from_bytes(plain_data.to_bytes(UserDict(a=1)))) is dict


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), b"x", namedtuple("N", "a")(1), Known("x"), torch.ones(2).to_sparse()]
)
def test_other_types_do_not_travel(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        plain_data.to_bytes([value])


def wire(told: Any, rest: bytes = b"") -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "big") + text + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        (2**40).to_bytes(8, "big"),
        pickle.dumps([1]),
        wire({"x": ["float32", [2**40], 0]}),
        wire({"x": ["float32", [-1], 0]}, b"1234"),
        wire({"x": ["float32", [1], -4]}, b"1234"),
        wire({"x": ["load", [1], 0]}, b"1234"),
        wire({"x": ["float32", [True], 0]}, b"1234"),
        wire({"k": ["Known", {"name": "x"}]}),
        wire({"k": ["Path", {}]}),
        wire({"k": ["Known", [1]]}),
        wire({"d": [[[1], 2]]}),
        wire({"d": 5}),
        wire({"p": 5}),
        wire({"q": 5}),
        wire({}),
        b"\0\0\0\0\0\1\0\0" + b"[" * 65536,
        b"\0\0\0\0\0\0\0\2\xff\xff",
    ],
)
def test_what_is_not_plain_data_is_rejected(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of many texts
        plain_data.from_bytes(data, [Known])


@given(st.binary(max_size=60))
def test_noise_is_data_or_rejected(noise: bytes) -> None:
    with contextlib.suppress(ValueError):
        plain_data.from_bytes(len(noise).to_bytes(8, "big") + noise, [Known])


def test_too_much_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "LIMIT", 1000)
    with pytest.raises(ValueError, match=r"a value must have at most 1,000 bytes, got 1,0.."):
        plain_data.to_bytes("x" * 1000)
