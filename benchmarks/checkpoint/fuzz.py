"""Do the parsers of a checkpoint read or reject every input, and do nothing else?

python benchmarks/checkpoint/fuzz.py [--seconds 300] [--seed 0]

Takes valid manifests, and valid headers of files whose hashes are computed anew, and damages them: as bytes (turned,
cut, repeated, swapped) and as trees (values replaced by others that are wrong, huge, negative, deep, or nearly right).
Each is read, and then consistent and written as it was read; or rejected with a `ShoalError`. Anything else fails.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.checkpoint.storage.manifest import CHUNK, SIZES, Entry, File, Manifest, Piece, tiles, with_checksum
from shoal.checkpoint.storage.shard_file import Reader
from shoal.errors import ShoalError

HASH = "0123456789abcdef" * 4
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 255, CHUNK, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), 0.0, 1.5,
    1e308, "", "x", "F32", "BF16", "F3", "..", "../../etc/passwd", "/etc/passwd", "a/b", ".hidden", "a" * 300, "\0",
    "\ud800", "\u202e", HASH, HASH[:-1], [], {}, [0], [1], [0, 0], [-1], [2**60, 2**60], [[]], [1] * 9, [None],
    {"": {}}, {"__class__": 1},
]  # fmt: skip


def some_manifest(rng: random.Random) -> bytes:
    """A valid one: tensors that were cut in two, some times, and put into some files."""
    files = [f"shard-{number:05d}.safetensors" for number in range(rng.randint(1, 3))]
    tensors = {}
    for number in range(rng.randint(0, 4)):
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 4)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(rng.randint(0, 3) if shape else 0):
            begin, size = boxes.pop(rng.randrange(len(boxes)))
            dim = rng.randrange(len(shape))
            at = rng.randint(0, size[dim])
            boxes.append((begin, (*size[:dim], at, *size[dim + 1 :])))
            rest = (*size[:dim], size[dim] - at, *size[dim + 1 :])
            boxes.append(((*begin[:dim], begin[dim] + at, *begin[dim + 1 :]), rest))
        pieces = tuple(Piece(rng.choice(files), f"t{number}@{begin}", begin, size) for begin, size in boxes)
        tensors[f"model/t{number}"] = Entry(rng.choice(list(SIZES)), shape, pieces)
    sizes = {name: rng.choice([60_000, CHUNK, CHUNK + 1]) for name in files}
    known = {name: File(size, (HASH,) * -(-size // CHUNK)) for name, size in sizes.items()}
    return Manifest(step=rng.randrange(10**6), tensors=tensors, files=known, state={"a": [1, {"b": 0.5}]}).to_bytes()


def read_manifest(text: bytes) -> bool:
    """Whether it was read, with its hash made right again; then nothing in it contradicts itself."""
    try:
        read = Manifest.parse(with_checksum(text))
    except ShoalError:
        return False
    assert Manifest.parse(read.to_bytes()) == read
    for entry in read.tensors.values():
        assert entry.dtype in SIZES
        assert tiles(entry.shape, [(piece.begin, piece.shape) for piece in entry.pieces])
        assert all(piece.file in read.files for piece in entry.pieces)
    assert all(not set(name) & set("/\\\0") and not name.startswith(".") for name in read.files)
    return True


def some_header(rng: random.Random) -> bytes:
    """A valid one."""
    header, end = {}, 0
    for number in range(rng.randint(1, 4)):
        dtype, shape = rng.choice(list(SIZES)), [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
        begin, size = end, SIZES[dtype]
        for extent in shape:
            size *= extent
        end += size
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps(header).encode()


def read_header(path: Path, text: bytes, data: bytes) -> bool:
    """Whether a file with this header was read; then every tensor that it names is there."""
    whole = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(whole)
    file = File(len(whole), (hashlib.sha256(whole).hexdigest(),))
    try:
        reader = Reader(path, file)
    except ShoalError as error:
        if path.name not in str(error):
            raise AssertionError("it does not name the file") from error
        return False
    with reader:
        for key, entry in reader.header.items():
            shape = entry["shape"]
            rows = reader.rows(key, entry["dtype"], shape, 0, shape[0] if shape else 1)
            assert list(rows.shape) == shape
    return True


def damaged(rng: random.Random, text: bytes) -> bytes:
    """The same, but for a few places."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(400))
    is_tree = rng.random() < 0.6
    if is_tree:
        tree = json.loads(text)
        for _ in range(rng.randint(1, 3)):
            _change(rng, tree)
        text = json.dumps(tree).encode()
    if not is_tree or rng.random() < 0.3:
        changed = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            at, to = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
            kind = rng.randrange(5)
            if kind == 0 and changed:
                changed[min(at, len(changed) - 1)] = rng.randrange(256)
            elif kind == 1:
                del changed[at : min(to, at + rng.choice([1, 8, 10_000]))]
            elif kind == 2:
                changed[at:at] = changed[at : min(to, at + 100)] * rng.choice([1, 2, 50])
            elif kind == 3:
                changed[at:at] = rng.choice(
                    [b"[" * 200, b"{", b"}", b",", b'"', b"\\u", b"1e999", b"NaN", b"-", b"9" * 5000]
                )
            else:
                changed[at:to] = bytes(reversed(changed[at:to]))
        text = bytes(changed)
    return text


def _change(rng: random.Random, tree: Any) -> None:
    """One value somewhere in it, or one name."""
    below = tree
    for _ in range(rng.randrange(7)):
        values = list(below.values()) if isinstance(below, dict) else below
        inner = [value for value in values if isinstance(value, dict | list) and value]
        if not inner:
            break
        below = rng.choice(inner)
    if not below:
        return
    key: Any = rng.choice(list(below)) if isinstance(below, dict) else rng.randrange(len(below))
    kind = rng.randrange(5)
    if kind == 0:
        del below[key]
    elif kind == 1 and isinstance(below, dict):
        below[rng.choice(["../x", "/x", "x", "", "shard-00000.safetensors", "\ud800"])] = below.pop(key)
    elif kind == 2 and type(below[key]) is int:
        below[key] += rng.choice([-1, 1, 2**32, -(2**32)])
    elif kind == 3:
        below[key] = copy.deepcopy(rng.choice(list(below.values()) if isinstance(below, dict) else below))
    else:
        below[key] = copy.deepcopy(rng.choice(ODD))


def fuzz(
    name: str, seconds: float, rng: random.Random, make: Callable[[random.Random], bytes], read: Callable[[bytes], bool]
) -> dict[str, str]:
    """Damage and read, for so long; returns a row of the table."""
    ended = time.monotonic() + seconds
    count = accepted = 0
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while time.monotonic() < ended:
        text = damaged(rng, make(rng))
        began = time.process_time()
        try:
            accepted += read(text)
        except BaseException:
            print(f"{name}: example {count}: {text!r}")
            raise
        slowest = max(slowest, time.process_time() - began)
        count += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "parser": name,
        "seconds": f"{seconds:.0f}",
        "examples": f"{count:,}",
        "refused": f"{count - accepted:,}",
        "read, and consistent": f"{accepted:,}",
        "anything else": "0",
        "slowest, ms of CPU": f"{slowest * 1e3:.1f}",
        "memory grew by, MiB": f"{grown / 1024:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    asked = arguments(parser, seconds=0.5)
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made-up.safetensors"

        size = 0

        def make(rng: random.Random) -> bytes:
            nonlocal size
            text = some_header(rng)
            size = max(entry["data_offsets"][1] for entry in json.loads(text).values())
            return text

        def read_file(text: bytes) -> bool:
            return read_header(path, text, bytes(size))  # as much data as it announced before it was damaged

        rows = [
            fuzz("manifest", asked.seconds * 0.6, rng, some_manifest, read_manifest),
            fuzz("header of a file", asked.seconds * 0.4, rng, make, read_file),
        ]
    said = f"Damaged manifests and headers, seed {asked.seed}: each is read, or refused with a `ShoalError`."
    text = heading("Parsers of a checkpoint, fuzzed", said) + "\n" + table(rows)
    print(text)
    print("written to", write("checkpoint-fuzz", text))


if __name__ == "__main__":
    main()
