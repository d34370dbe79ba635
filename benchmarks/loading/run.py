"""How many samples per second does a Loader deliver, with a thread and with processes, pinned or not?

python benchmarks/loading/run.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.config.recipe import DataSection
from shoal.data.dataset import Dataset
from shoal.data.loader import Loader, RankStream
from shoal.data.sources.open import open_datasets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="samples per batch")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each case is measured")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2], help="0: a thread; else processes")
    asked = arguments(parser, seconds=0.02, workers=[0], sequence=64)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, section in _cases(asked.sequence, Path(folder)).items():
            dataset, _ = open_datasets(section, seed=0)
            for workers in asked.workers:
                for pin in (False, True) if torch.cuda.is_available() else (False,):
                    rows.append(_row(name, dataset, asked.batch, workers, pin, asked.seconds))
    question = f"Measured samples per second of a `Loader`, batches of {asked.batch}, nothing else running."
    text = heading("Loading", question) + "\n" + table(rows)
    print(text)
    print("written to", write("loading", text))


def _cases(sequence: int, folder: Path) -> dict[str, DataSection]:
    _make_photos(folder)
    return {
        f"python, {sequence} tokens": DataSection(seq_len=sequence),
        f"synthetic, {sequence} tokens": DataSection(source="synthetic", seq_len=sequence),
        "JPEG files of 320 x 240, scaled to 64": DataSection(source=str(folder), format="images", image_size=64),
    }


def _make_photos(folder: Path, per_class: int = 128) -> None:
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / name).mkdir()
        for number in range(per_class):
            pixels = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")


def _row(name: str, dataset: Dataset, batch: int, workers: int, pin: bool, seconds: float) -> dict[str, str]:
    loader = Loader(RankStream(dataset, seed=0, batch=batch), workers=workers, pin=pin)
    warm_up = list(islice(loader, 3 + 2 * workers))  # starts the workers and empties what was made meanwhile
    size = sum(tensor.nbytes for tensor in warm_up[0].values())
    batches, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        next(loader)
        batches += 1
    loader.close()
    return {
        "data": name,
        "prepared by": f"{workers} process{'es' if workers > 1 else ''}" if workers else "a thread",
        "pinned": "yes" if pin else "no",
        "samples/s": f"{batches * batch / elapsed:,.0f}",
        "MB/s": f"{batches * size / elapsed / 1e6:,.0f}",
        "ms per batch": f"{elapsed / batches * 1e3:.2f}",
    }


if __name__ == "__main__":
    main()
