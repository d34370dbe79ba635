"""How many samples per second does a Loader bring, by a thread and by processes? See README.md."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import time
from itertools import islice

import torch

from shoal.blueprint.recipe import DataSection
from shoal.data.dataset import Dataset
from shoal.data.loading import Loader
from shoal.data.open import open_datasets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="samples per batch")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each case is measured")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of the synthetic images")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2], help="0: a thread; else processes")
    arguments = parser.parse_args()
    print(_header())
    print("\n| data | prepared by | pinned | samples/s | MB/s | ms per batch |\n|---|---|---|---:|---:|---:|")
    for name, section in _cases(arguments).items():
        dataset, _ = open_datasets(section, seed=0)
        for workers in arguments.workers:
            for pin in (False, True) if torch.cuda.is_available() else (False,):
                print(_row(name, dataset, arguments.batch, workers, pin, arguments.seconds), flush=True)


def _cases(arguments: argparse.Namespace) -> dict[str, DataSection]:
    size = arguments.image_size
    return {
        f"python, {arguments.sequence} tokens": DataSection(sequence=arguments.sequence),
        f"synthetic, {arguments.sequence} tokens": DataSection(source="synthetic", sequence=arguments.sequence),
        f"synthetic images, {size} x {size}": DataSection(
            source="synthetic", synthetic_kind="images", image_size=size, vocabulary=100
        ),
    }


def _row(name: str, dataset: Dataset, batch: int, workers: int, pin: bool, seconds: float) -> str:
    loader = Loader(dataset, seed=0, batch=batch, workers=workers, pin=pin)
    warm_up = list(islice(loader, 3 + 2 * workers))  # starts the workers and empties what was made meanwhile
    size = sum(tensor.nbytes for tensor in warm_up[0].values())
    batches, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        next(loader)
        batches += 1
    loader.close()
    by = f"{workers} process{'es' if workers > 1 else ''}" if workers else "a thread"
    rates = f"{batches * batch / elapsed:,.0f} | {batches * size / elapsed / 1e6:,.0f} | {elapsed / batches * 1e3:.2f}"
    return f"| {name} | {by} | {'yes' if pin else 'no'} | {rates} |"


def _header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return "\n".join(
        [
            f"- hardware: {platform.machine()}, {os.cpu_count()} cores, {device}",
            f"- versions: Python {platform.python_version()}, torch {torch.__version__}",
            f"- date: {datetime.date.today().isoformat()}",
            f"- command: python {shlex.join(sys.argv)}",
        ]
    )


if __name__ == "__main__":
    main()
