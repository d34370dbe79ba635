"""What is the overhead of `shoal train` over a plain DDP loop, and how long does it take to the first step?

python benchmarks/overhead/run.py [--steps 60] [--repeats 5] [--smoke]

Both loops run in the same two processes and alternate step by step, so that both have the same conditions: shoal's loop
gets a batch from its loader, and the loader first makes a step of the other loop. Steps are timed with their data.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.config.load import load_recipe
from shoal.data.loader import Loader
from shoal.launch.local import launch
from shoal.numerics.init import initialise
from shoal.train.build_model import build_model
from shoal.train.recipe import build_run, loop
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.preflight import Job, preflight

WARMUP = 10


class ByHand:
    """What a person writes: DDP, AdamW, clipping, a DataLoader, the loss of each step read."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        share = job.recipe.data.global_batch // world_size
        # The same samples as plain tensors; enough of them for the whole measurement.
        data = job.training.batch(torch.arange(rank, 4096, world_size).numpy() % len(job.training))
        dataset = torch.utils.data.TensorDataset(data["tokens"], data["labels"])
        self.loader = torch.utils.data.DataLoader(dataset, batch_size=share, shuffle=True, drop_last=True)
        model = build_model(job.recipe.model)
        initialise(model, 0)
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def step(self) -> float:
        tokens, labels = next(self.batches)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class TakingTurns(Loader):
    """shoal's loader, which makes one step of the other loop before it hands out a batch."""

    others: ByHand | None = None
    ours: list[float]
    theirs: list[float]
    handed_out: float | None = None
    job: Job
    last: TakingTurns

    def __next__(self) -> Any:
        now = time.perf_counter()
        our_step = None if self.handed_out is None else now - self.handed_out
        if self.others is None:
            self.ours, self.theirs = [], []
            self.others = ByHand(self.job, dist.get_rank(), dist.get_world_size())
        began = time.perf_counter()
        self.others.step()
        self.theirs.append(time.perf_counter() - began)
        began = time.perf_counter()
        batch = super().__next__()
        if our_step is not None:
            self.ours.append(our_step + time.perf_counter() - began)
        self.handed_out = time.perf_counter()
        TakingTurns.last = self
        return batch


def take_turns(placement: Placement, store: dist.Store, job: Job) -> tuple[list[float], list[float]]:
    TakingTurns.job = job
    assert build_run.Loader is Loader, (
        "shoal.train.recipe.build_run no longer builds the Loader: patch the module that does"
    )
    build_run.Loader = TakingTurns  # the one thing that differs from `shoal train`
    loop.train(placement, store, job, RunInvocation(quiet=True, start_time=time.time()))
    both = TakingTurns.last
    return both.ours[WARMUP:], both.theirs[WARMUP:]


def measure_steps(settings: list[tuple[str, str]], steps: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        where = [("run.duration", f"{steps + WARMUP}step"), ("run.dir", f"{folder}/run")]
        recipe = load_recipe(Path("recipes/tiny.yaml"), [*settings, *where])
        ours, theirs = launch(take_turns, (preflight(recipe, 2),), nproc=2)[0]
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    return {
        "a step of": f"{recipe.data.global_batch} x {recipe.data.seq_len} tokens",
        "by hand, median": f"{statistics.median(theirs) * 1e3:.1f} ms",
        "shoal train, median": f"{statistics.median(ours) * 1e3:.1f} ms",
        "ratio of medians": f"{statistics.median(ours) / statistics.median(theirs):.3f}",
        "median of ratios": f"{statistics.median(pairs):.3f}",
        "steps": str(len(pairs)),
    }


def measure_start(repeats: int) -> list[float]:
    """Seconds from the command to the end of the first step, seen from outside."""
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "shoal",
                "train",
                "recipes/tiny.yaml",
                "--quiet",
                "--run.duration",
                "1step",
            ]
            began = time.time()
            subprocess.run([*command, "--data.validation", "0", "--run.dir", f"{folder}/run"], check=True, stdout=-3)
            seconds.append((Path(folder) / "run" / "metrics.jsonl").stat().st_mtime - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    asked = arguments(parser, steps=3, repeats=1)
    nothing_held_out = ("data.validation", "0")
    cases = [
        ([nothing_held_out], asked.steps),
        ([nothing_held_out, ("data.global_batch", "4"), ("data.seq_len", "128")], asked.steps * 3),
        ([nothing_held_out, ("data.global_batch", "2"), ("data.seq_len", "32")], asked.steps * 5),
    ]
    rows = [measure_steps(settings, steps) for settings, steps in (cases[-1:] if asked.smoke else cases)]
    starts = measure_start(asked.repeats)
    text = "\n".join(
        [
            heading("Overhead", "`recipes/tiny.yaml` with 2 processes, in turns with a DDP loop written by hand."),
            table(rows),
            "",
            f"From the command to the end of the first step, {len(starts)} times:"
            f" median {statistics.median(starts):.2f} s, fastest {min(starts):.2f} s, slowest {max(starts):.2f} s.",
        ]
    )
    print(text)
    print("written to", write("overhead", text))


if __name__ == "__main__":
    main()
