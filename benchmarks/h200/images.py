"""ResNet-50 with shoal and with a plain loop, in one process, alternating.

python benchmarks/h200/images.py [--batch 256] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments

from shoal.models.resnet import build
from shoal.numerics.init import initialise
from shoal.train.run import Run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU is for --smoke."""


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def by_hand(images: Tensor, labels: Tensor, compiles: bool) -> Callable[[], None]:
    model = build(preset="resnet50")
    initialise(model, 0)
    model = model.to(DEVICE).to(memory_format=torch.channels_last)
    compiled = torch.compile(model) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        x, y = images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_shoal(images: Tensor, labels: Tensor, compiles: bool) -> Callable[[], None]:
    run = Run(f"mb={len(images)} {'bf16' if DEVICE == 'cuda' else 'fp32'}", compile=compiles)
    model = build(preset="resnet50")
    initialise(model, 0)
    model = model.to(memory_format=torch.channels_last)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True))

    def step() -> None:
        run.step((images, labels))

    return step


def rate(step: Callable[[], None], batch: int, steps: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return steps * batch / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    args = arguments(parser, batch=2, rounds=1, steps=1)
    size = 32 if args.smoke else 224
    images = torch.randn(args.batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (args.batch,))
    if DEVICE == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    compiles = not args.smoke
    steps = {"by hand": by_hand(images, labels, compiles), "shoal": by_shoal(images, labels, compiles)}
    for step in steps.values():
        rate(step, args.batch, args.steps)  # compiles
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            rates[name].append(rate(step, args.batch, args.steps))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    rates = {f"{name}, images/s": round(median) for name, median in medians.items()}
    print(json.dumps({"batch": args.batch, **rates, "ratio": round(medians["shoal"] / medians["by hand"], 3)}))


if __name__ == "__main__":
    main()
