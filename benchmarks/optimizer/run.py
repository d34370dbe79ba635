"""Which implementation of AdamW and SGD is the fastest here: fused, foreach or loop?

python benchmarks/optimizer/run.py [--smoke]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.config.recipe import ModelSection, OptimSection
from shoal.numerics.init import initialise
from shoal.numerics.optim.build import build_optimizer
from shoal.train.build_model import build_model

IMPLEMENTATIONS = ("fused", "foreach", "loop")


def parameters(preset: str, device: str) -> list[nn.Parameter]:
    model = build_model(ModelSection(name="llama", preset=preset))
    initialise(model, 0)
    model.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return list(model.parameters())


def measure(name: str, preset: str, device: str, rounds: int) -> dict[str, str]:
    """Milliseconds per step, the implementations taking turns."""
    weights = parameters(preset, device)
    optimizers = {
        kind: build_optimizer(weights, OptimSection(name=name, implementation=kind), lr=1e-6)
        for kind in IMPLEMENTATIONS
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in IMPLEMENTATIONS}
    for _ in range(rounds):
        for kind, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(times[rounds // 5 :]) * 1e3 for kind, times in seconds.items()}
    count = sum(weight.numel() for weight in weights)
    return {
        "optimizer": name,
        "device": device,
        "parameters": f"{count:,}",
        **{f"{kind}, ms": f"{value:.2f}" for kind, value in medians.items()},
        "fastest": min(medians, key=lambda kind: medians[kind]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    asked = arguments(parser, rounds=1)
    places = [("cpu", "tiny")] if asked.smoke else [("cpu", "tiny"), ("cpu", "small")]
    if torch.cuda.is_available() and not asked.smoke:
        places += [("cuda", "small"), ("cuda", "llama3-1b")]
    rows = [measure(name, preset, device, asked.rounds) for device, preset in places for name in ("adamw", "sgd")]
    text = (
        heading("Optimizer", "Median time of one step in float32, implementations taking turns.") + "\n" + table(rows)
    )
    print(text)
    print("written to", write("optimizer", text))


if __name__ == "__main__":
    main()
