"""What does `run.check_compute` cost? A step in which gradients are compared, beside the one before it."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.models.llama import build
from shoal.train.run import Run

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

SIZES = {"hidden": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "vocabulary": 1024, "max_sequence": 128}


def measure(place: Placement, store: dist.Store, steps: int) -> dict[str, Any]:
    """Seconds and CPU seconds of steps; every second one is compared."""
    world = World.start(place, device="cpu", store=store, threads=1)
    with Run(world=world, check_compute=2) as run:
        model = build(**SIZES, ffn=256)
        run.prepare(model, torch.optim.AdamW(model.parameters()))
        tokens = torch.randint(0, 1024, (8, 129), generator=torch.Generator().manual_seed(world.rank))
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        found: dict[str, Any] = {"time": [], "cpu": [], "parameters": sum(each.numel() for each in model.parameters())}
        for _ in range(2 * steps + 2):
            began, used = time.perf_counter(), time.process_time()
            run.step(batch)
            found["time"].append(time.perf_counter() - began)
            found["cpu"].append(time.process_time() - used)
        return found


def extra(values: list[float]) -> float:
    """The median of what a compared step takes more than the one before it, in steps; the first pair warms up."""
    return statistics.median(after / before - 1 for before, after in zip(values[2::2], values[3::2], strict=True))


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25, help="of each kind")
    options = report.arguments(parser, steps=2)
    found = launch(measure, (options.steps,), nproc=2)[0]
    wall, cpu = extra(found["time"]), extra(found["cpu"])
    rows = [
        {
            "parameters": f"{found['parameters'] / 1e6:.1f} M",
            "step, ms": f"{statistics.median(found['time'][2::2]) * 1e3:.1f}",
            "a comparison takes": f"{wall:.2f} steps",
            "of CPU time": f"{cpu:.2f} steps",
            "every 100 steps": f"{wall / 100:.2%}",
        }
    ]
    question = (
        "What does a comparison of gradients with another rank's (`run.check_compute`) cost? 2 ranks, float32; the load"
        f" average was {os.getloadavg()[0]:.1f}."
    )
    print(question, report.table(rows), sep="\n")
    print(report.write("replay", f"{report.heading('Comparison of gradients', question)}\n{report.table(rows)}"))


if __name__ == "__main__":
    main()
