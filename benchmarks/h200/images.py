"""ResNet-50 by shoal and by a loop that a person would write, in one process, in turns.

python benchmarks/h200/images.py [--batch 256] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.resnet import build
from shoal.numerics.init import initialise
from shoal.train.run import Run


def by_hand(images: Tensor, labels: Tensor) -> Callable[[], None]:
    model = build(preset="resnet50")
    initialise(model, 0)
    model = model.cuda().to(memory_format=torch.channels_last)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        x, y = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_shoal(images: Tensor, labels: Tensor) -> Callable[[], None]:
    run = Run(f"mb={len(images)} bf16", compile=True)
    model = build(preset="resnet50")
    initialise(model, 0)
    model = model.to(memory_format=torch.channels_last)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True))

    def step() -> None:
        run.step((images, labels))

    return step


def rate(step: Callable[[], None], batch: int, steps: int = 10) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return steps * batch / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    images = torch.randn(arguments.batch, 3, 224, 224).contiguous(memory_format=torch.channels_last).pin_memory()
    labels = torch.randint(0, 1000, (arguments.batch,)).pin_memory()
    steps = {"by hand": by_hand(images, labels), "shoal": by_shoal(images, labels)}
    for step in steps.values():
        rate(step, arguments.batch)  # compiles
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            rates[name].append(rate(step, arguments.batch))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    told = {f"{name}, images/s": round(median) for name, median in medians.items()}
    print(json.dumps({"batch": arguments.batch, **told, "ratio": round(medians["shoal"] / medians["by hand"], 3)}))


if __name__ == "__main__":
    main()
