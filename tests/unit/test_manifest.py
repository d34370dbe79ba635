"""The manifest: what was written is read, and whatever else is given is refused by name, in bounded time and memory."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.checkpoint.storage.manifest import CHUNK, Entry, File, Manifest, Piece, tiles, with_checksum
from shoal.errors import ShoalError
from tests.cover import examples

HASH = "0" * 64


def manifest() -> Manifest:
    return Manifest(
        step=120,
        tensors={
            "a.weight": Entry(
                "F32",
                (4, 6),
                (Piece("shard-0.safetensors", "a", (0, 0), (3, 6)), Piece("shard-1.safetensors", "a", (3, 0), (1, 6))),
            ),
            "a.bias": Entry("BF16", (6,), (Piece("shard-0.safetensors", "b", (0,), (6,)),)),
            "scalar": Entry("I64", (), (Piece("shard-1.safetensors", "s", (), ()),)),
            "empty": Entry("F32", (0, 3), ()),
        },
        files={"shard-0.safetensors": File(CHUNK + 1, (HASH, HASH)), "shard-1.safetensors": File(40, (HASH,))},
        state={"data": {"step": 120}, "seed": 7},
    )


def test_what_was_written_is_read() -> None:
    assert Manifest.parse(manifest().to_bytes()) == manifest()


def changed(*path: Any, to: Any) -> bytes:
    tree = json.loads(manifest().to_bytes())
    below = tree
    for key in path[:-1]:
        below = below[key]
    if to is None:
        del below[path[-1]]
    else:
        below[path[-1]] = to
    return json.dumps(tree).encode()


FIRST = ("tensors", "a.weight", "pieces", 0)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"\x80\x04\x95pickle", "not JSON"),
    "no text": (b"\xff\xfe", "not JSON"),
    "a list": (b"[]", "no keys and values"),
    "another format": (changed("format", to="zip"), "format 'zip'"),
    "a later version": (changed("version", to=3), "version 3"),
    "an earlier version": (changed("version", to=1), "version 1"),
    "no step": (changed("step", to=None), "no 'step'"),
    "a step that is true": (changed("step", to=True), "no 'step'"),
    "a step below 0": (changed("step", to=-1), "step=-1"),
    "a path": (changed("files", "../../etc/passwd", to={"bytes": 0, "chunk_bytes": CHUNK, "sha256": []}), "passwd"),
    "an absolute path": (changed("files", "/etc/x", to={"bytes": 0, "chunk_bytes": CHUNK, "sha256": []}), "/etc/x"),
    "a hidden file": (changed("files", ".x", to={"bytes": 0, "chunk_bytes": CHUNK, "sha256": []}), "'.x'"),
    "other chunks": (changed("files", "shard-1.safetensors", "chunk_bytes", to=1), "chunks of 1 bytes"),
    "a hash too few": (changed("files", "shard-0.safetensors", "sha256", to=[HASH]), "1 hashes"),
    "a hash that is none": (changed("files", "shard-1.safetensors", "sha256", to=["zz"]), "invalid hash"),
    "more bytes than hashes": (changed("files", "shard-1.safetensors", "bytes", to=2**52), "hashes for"),
    "an absurd dtype": (changed("tensors", "a.bias", "dtype", to="F3"), "F3"),
    "a negative shape": (changed("tensors", "a.bias", "shape", to=[-6]), "shape [-6]"),
    "an endless shape": (changed("tensors", "a.bias", "shape", to=[2**30, 2**30]), "too many elements"),
    "an endless shape of nothing": (changed("tensors", "empty", "shape", to=[2**30, 0, 2**30]), "too many elements"),
    "many dims": (changed("tensors", "a.bias", "shape", to=[1] * 9), "shape [1, 1"),
    "a shape of texts": (changed("tensors", "a.bias", "shape", to=["6"]), "shape ['6']"),
    "a file that is not listed": (changed(*FIRST, "file", to="other"), "'other', which it does not list"),
    "a negative begin": (changed(*FIRST, "begin", to=[-1, 0]), "begin [-1"),
    "another number of dims": (changed(*FIRST, "begin", to=[0]), "number of dims"),
    "a gap": (changed(*FIRST, "shape", to=[2, 6]), "do not fill"),
    "an overlap": (changed(*FIRST, "shape", to=[4, 6]), "do not fill"),
    "one piece too many": (changed("tensors", "a.bias", "pieces", to=[]), "do not fill"),
    "a piece larger than its file": (changed("files", "shard-1.safetensors", "bytes", to=23), "which has 23"),
    "an infinite number": (changed("state", "x", to=1).replace(b'"x": 1', b'"x": 1e999'), "a number is 1e999"),
    "a very long number": (changed("step", to=1).replace(b'"step": 1,', b'"step": ' + b"9" * 5000 + b","), "not JSON"),
    "half of a character": (changed("tensors", "\ud800", to={}), "not JSON"),
    "another encoding": (manifest().to_bytes().decode().encode("utf-16"), "not JSON"),
    "more parts than there can be": (b"[" + b"[]," * (2**25 // 2) + b"[]]", "parts"),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, "levels deep"),
    "deep nesting in the state": (changed("state", "x", to=json.loads("[" * 90 + "]" * 90)), "levels deep"),
    "not a number": (manifest().to_bytes().replace(b"120", b"NaN", 1), "NaN"),
    "a key twice": (b'{"format": "shoal checkpoint", "format": "x"}', "twice"),
    "cut off": (manifest().to_bytes()[:-20], "not JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    text, what = HOSTILE[name]
    with pytest.raises(ShoalError) as told:
        Manifest.parse(text)
    assert what in str(told.value)
    assert "fix:" in str(told.value)


def test_a_claim_of_many_entries_costs_what_was_sent() -> None:
    """10⁹ elements, or entries, that are only claimed, are not allocated."""
    text = changed("files", "shard-1.safetensors", "bytes", to=10**9 * CHUNK)
    tracemalloc.start()
    with pytest.raises(ShoalError):
        Manifest.parse(text)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


# ---- tiling ---------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A box cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        begin, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        first = (*size[:dim], at, *size[dim + 1 :])
        rest = (*size[:dim], size[dim] - at, *size[dim + 1 :])
        moved = (*begin[:dim], begin[dim] + at, *begin[dim + 1 :])
        boxes += [(begin, first), (moved, rest)]
    return shape, boxes


def painted(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Place by place: each is claimed once, and none outside."""
    count: dict[tuple[int, ...], int] = {}
    for begin, size in boxes:
        for place in itertools.product(*(range(b, b + s) for b, s in zip(begin, size, strict=True))):
            count[place] = count.get(place, 0) + 1
    return count == dict.fromkeys(itertools.product(*map(range, shape)), 1)


@given(cuts(), st.data())
@settings(max_examples=examples(100, 300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_corners_cancel_exactly_where_places_are_claimed_once(made: Any, data: st.DataObject) -> None:
    shape, boxes = made
    assert tiles(shape, boxes)
    assert painted(shape, boxes)
    number = data.draw(st.integers(0, len(boxes) - 1))
    begin, size = boxes[number]
    dim = data.draw(st.integers(0, len(shape) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    moved = (*begin[:dim], max(0, begin[dim] + shift), *begin[dim + 1 :])
    other = [*boxes[:number], (moved, size), *boxes[number + 1 :]]
    assert tiles(shape, other) == painted(shape, other)
    assert tiles(shape, boxes[:number] + boxes[number + 1 :]) == painted(shape, boxes[:number] + boxes[number + 1 :])
    assert tiles(shape, [*boxes, boxes[number]]) == painted(shape, [*boxes, boxes[number]])


# ---- fuzzing --------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400))
@settings(max_examples=examples(100, 300), deadline=None)
def test_any_bytes_are_refused_or_read(text: bytes) -> None:
    with pytest.raises(ShoalError):
        Manifest.parse(text)


def check(text: bytes) -> bool:
    """Whether it is read; then nothing in it contradicts itself, and it is written as it was read."""
    try:
        read = Manifest.parse(text)
    except ShoalError:
        return False
    assert Manifest.parse(read.to_bytes()) == read
    for entry in read.tensors.values():
        assert tiles(entry.shape, [(piece.begin, piece.shape) for piece in entry.pieces])
        assert all(piece.file in read.files for piece in entry.pieces)
    assert all("/" not in name and not name.startswith(".") for name in read.files)
    return True


@given(st.data())
@settings(max_examples=examples(100, 300), deadline=None)
def test_a_damaged_manifest_is_refused_or_says_what_can_be(data: st.DataObject) -> None:
    text = bytearray(manifest().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(text))
    check(with_checksum(bytes(text)))  # as somebody does who means to


def test_who_means_to_change_it_can() -> None:
    """The hash is against accidents; what is in it is judged all the same."""
    assert Manifest.parse(with_checksum(changed("step", to=121))).step == 121
    assert check(with_checksum(changed("tensors", "a.bias", "dtype", to="F16")))
    assert not check(with_checksum(changed("tensors", "a.bias", "dtype", to="F3")))


def test_every_bit_of_it_counts() -> None:
    text = manifest().to_bytes()
    for place in range(len(text)):
        for bit in (0, 4):
            turned = bytearray(text)
            turned[place] ^= 1 << bit
            with pytest.raises(ShoalError):
                Manifest.parse(bytes(turned))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=examples(100, 300), deadline=None)
def test_a_manifest_with_other_values_is_refused_or_says_what_can_be(data: st.DataObject) -> None:
    """The text is JSON as before, and what it says at some places is not."""
    tree = json.loads(manifest().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        below: Any = tree
        for _ in range(data.draw(st.integers(0, 5))):
            inner = list(below.values()) if isinstance(below, dict) else below
            inner = [value for value in inner if isinstance(value, dict | list) and value]
            if not inner:
                break
            below = data.draw(st.sampled_from(inner))
        key = data.draw(st.sampled_from(sorted(below) if isinstance(below, dict) else range(len(below))))
        below[key] = data.draw(JSON | st.sampled_from([0, 1, 3, 4, 6, [0], [3, 0], [4, 6], "F32", HASH]))
    check(with_checksum(json.dumps(tree).encode()))
