"""What does a profile cost a run on CPUs?

python benchmarks/profile/cost.py [--plans dp_replicate=2 zero=3] [--steps 3] [--rounds 9]

Two ranks train a small llama. Every round makes so many steps with each of these: nothing, the timer of the parts,
nothing, torch's profiler on rank 0, which records the trace, and nothing. A cost is relative to the mean of the two
turns around it; the median over rounds counts. `off` is the difference between the first two turns with nothing: what
the machine does by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise
from shoal.train.profile.operators import OperatorTrace
from shoal.train.profile.profiler import Profiler
from shoal.train.run import Run

MOST_PARTS, MOST_TRACE = 0.03, 0.30
"""The bars."""


def measured(placement: Placement | None, store: Any, plan: str, asked: dict[str, int]) -> list[dict[str, float]]:
    """Each round of one plan, on every rank."""
    world = World.start(placement, device="cpu", store=store, threads=1)
    width, length = asked["hidden"], asked["sequence"]
    config = LlamaConfig(hidden=width, num_layers=4, num_heads=4, num_kv_heads=4, ffn=3 * width, vocabulary=256)
    model = Llama(config)
    initialise(model, 0)
    tokens = torch.randint(0, 256, (8, length + 1), generator=torch.Generator().manual_seed(world.rank))
    with Run(f"{plan} fp32 mb=4", world=world) as run:
        run.prepare(model, torch.optim.AdamW(model.parameters()))
        share = tokens[: 8 // run.degree]
        batch = {"tokens": share[:, :-1].contiguous(), "labels": share[:, 1:].contiguous()}
        for _ in range(3):
            run.step(batch)
        return [_round(run, batch, asked["steps"]) for _ in range(asked["rounds"])]


def _round(run: Run, batch: dict[str, torch.Tensor], steps: int) -> dict[str, float]:
    def clocked() -> float:
        run.world.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            run.step(batch)
        return (time.perf_counter() - start) / steps

    before = clocked()
    profiler = Profiler(run)
    profiler.start()
    run.step(batch)  # the first one is not timed
    parts = clocked()
    profiler.finish()
    between = clocked()
    trace = OperatorTrace.begin(run.device) if run.world.is_main else None
    traced = clocked()
    if trace is not None:
        trace.stop()
    after = clocked()
    return {
        "step": (before + between) / 2,
        "off": between / before - 1,
        "parts": 2 * parts / (before + between) - 1,
        "trace": 2 * traced / (between + after) - 1,
    }


def row(plan: str, rounds: list[dict[str, float]]) -> dict[str, str]:
    """One line of the table."""

    def spread(name: str) -> str:
        values = [each[name] for each in rounds]
        return f"{statistics.median(values):+.1%} ({min(values):+.0%} to {max(values):+.0%})"

    step = statistics.median(each["step"] for each in rounds)
    costs = {name: spread(name) for name in ("off", "parts", "trace")}
    return {"plan": f"`{plan}`", "step": f"{step * 1e3:.0f} ms", **costs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", nargs="+", default=["dp_replicate=2", "zero=3", "tp=2", "pp=2 1f1b"])
    parser.add_argument("--steps", type=int, default=3, help="of every turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    asked = arguments(parser, plans=["dp_replicate=2"], steps=1, rounds=1, hidden=32, sequence=16)
    sizes = {name: getattr(asked, name) for name in ("steps", "rounds", "hidden", "sequence")}
    before, rows, worst = os.getloadavg()[0], [], {"parts": 0.0, "trace": 0.0}
    for plan in asked.plans:
        rounds = launch(measured, (plan, sizes), nproc=2)[0]
        rows.append(row(plan, rounds))
        worst = {name: max(worst[name], statistics.median(each[name] for each in rounds)) for name in worst}
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    is_met = worst["parts"] <= MOST_PARTS and worst["trace"] <= MOST_TRACE
    said = f"At most {worst['parts']:.1%} for the parts and {worst['trace']:.1%} for the trace"
    said += f": {'within' if is_met else 'NOT within'} the bars of {MOST_PARTS:.0%} and {MOST_TRACE:.0%}"
    said += f". The load of this machine was {before:.0f} before and {os.getloadavg()[0]:.0f} after it."
    text = f"{heading('The cost of a profile on CPUs', said)}\n{table(rows)}"
    print(text)
    print(write("profile-cost", text))


if __name__ == "__main__":
    main()
