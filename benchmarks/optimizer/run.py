"""Which implementation of AdamW and SGD is the fastest here: fused, foreach or loop?

python benchmarks/optimizer/run.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import heading, table, write

from shoal.blueprint.recipe import ModelSection, OptimSection
from shoal.numerics.init import initialise
from shoal.numerics.optim import build_optimizer
from shoal.train.build import build_model

IMPLEMENTATIONS = ("fused", "foreach", "loop")
ROUNDS = 15


def parameters(preset: str, device: str) -> list[nn.Parameter]:
    model = build_model(ModelSection(name="llama", preset=preset))
    initialise(model, 0)
    model.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return list(model.parameters())


def measure(name: str, preset: str, device: str) -> dict[str, str]:
    """Milliseconds per step, the implementations taking turns."""
    weights = parameters(preset, device)
    optimizers = {
        kind: build_optimizer(weights, OptimSection(name=name, implementation=kind), lr=1e-6)
        for kind in IMPLEMENTATIONS
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in IMPLEMENTATIONS}
    for _ in range(ROUNDS):
        for kind, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(times[3:]) * 1e3 for kind, times in seconds.items()}
    count = sum(weight.numel() for weight in weights)
    return {
        "optimizer": name,
        "device": device,
        "parameters": f"{count:,}",
        **{f"{kind}, ms": f"{value:.2f}" for kind, value in medians.items()},
        "fastest": min(medians, key=lambda kind: medians[kind]),
    }


def main() -> None:
    places = [("cpu", "tiny"), ("cpu", "small")]
    places += [("cuda", "small"), ("cuda", "llama3-1b")] if torch.cuda.is_available() else []
    rows = [measure(name, preset, device) for device, preset in places for name in ("adamw", "sgd")]
    text = (
        heading("Optimizer", "Median time of one step in float32, implementations taking turns.") + "\n" + table(rows)
    )
    print(text)
    print("written to", write("optimizer", text))


if __name__ == "__main__":
    main()
