"""What does a profile cost a run on CPUs?

python benchmarks/profile/cost.py [--plans dp_replicate=2 zero=3] [--steps 1] [--rounds 40]

Two ranks train a small llama. Every round makes so many steps with each of these: nothing, the timer of the parts,
nothing, torch's profiler on rank 0, which records the trace, and nothing. A cost is relative to the mean of the two
turns around it; the median over rounds counts, with the interval that holds 95 % of the medians of rounds drawn again.
`off` is the difference between the first two turns with nothing: what the machine does by itself. Steps are timed by
the clock and in processor time of rank 0, which other programs on the machine disturb less; a profile costs no other
time than that, since no part of it waits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
KINDS = ("clock", "cores")
"""What a step is measured by."""


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
    def clocked() -> tuple[float, float]:
        """Seconds of a step: by the clock, and of all cores."""
        run.world.barrier()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            run.step(batch)
        return (time.perf_counter() - start) / steps, (time.process_time() - used) / steps

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
    found = {"step": (before[0] + between[0]) / 2}
    for place, name in enumerate(KINDS):
        found[f"off, {name}"] = between[place] / before[place] - 1
        found[f"parts, {name}"] = 2 * parts[place] / (before[place] + between[place]) - 1
        found[f"trace, {name}"] = 2 * traced[place] / (between[place] + after[place]) - 1
    return found


def row(plan: str, rounds: list[dict[str, float]]) -> dict[str, str]:
    """One line of the table."""

    def spread(name: str) -> str:
        values = [each[name] for each in rounds]
        low, high = interval(values)
        return f"{statistics.median(values):+.1%} ({low:+.1%} to {high:+.1%})"

    step = statistics.median(each["step"] for each in rounds)
    costs = {name: spread(name) for name in rounds[0] if name != "step"}
    return {"plan": f"`{plan}`", "step": f"{step * 1e3:.0f} ms", **costs}


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Where 95 % of the medians are of as many values, drawn from these."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-1 - draws // 40]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", nargs="+", default=["dp_replicate=2", "zero=3", "tp=2", "pp=2 1f1b"])
    parser.add_argument("--steps", type=int, default=1, help="of every turn")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    asked = arguments(parser, plans=["dp_replicate=2"], steps=1, rounds=1, hidden=32, sequence=16)
    sizes = {name: getattr(asked, name) for name in ("steps", "rounds", "hidden", "sequence")}
    before, rows, worst = os.getloadavg()[0], [], dict.fromkeys(("parts", "trace"), 0.0)
    for plan in asked.plans:
        rounds = launch(measured, (plan, sizes), nproc=2)[0]
        rows.append(row(plan, rounds))
        for name, so_far in worst.items():
            worst[name] = max(so_far, statistics.median(each[f"{name}, cores"] for each in rounds))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    is_met = worst["parts"] <= MOST_PARTS and worst["trace"] <= MOST_TRACE
    said = f"At most {worst['parts']:.1%} for the parts and {worst['trace']:.1%} for the trace, in processor time"
    said += f": {'within' if is_met else 'NOT within'} the bars of {MOST_PARTS:.0%} and {MOST_TRACE:.0%}"
    said += f". The load of this machine was {before:.0f} before and {os.getloadavg()[0]:.0f} after it."
    text = f"{heading('The cost of a profile on CPUs', said)}\n{table(rows)}"
    print(text)
    print(write("profile-cost", text))


if __name__ == "__main__":
    main()
