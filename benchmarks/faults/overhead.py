"""What do heartbeats cost? Training-like steps of 10 ms on 2 ranks, with and without them, by turns in one run."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.heartbeat.heart import Heart, begin_step, heart
from shoal.comm.rendezvous.environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

STEP = 0.010
"""Seconds of a step, of which most are computation."""


def measure(place: Placement, store: dist.Store, turns: int, steps: int) -> dict[str, Any]:
    """Seconds of a step with and without heartbeats in each turn, and the CPU time of the heartbeat's thread."""
    beating = heart()
    assert beating is not None
    with World.start(place, device="cpu", store=store, threads=1) as world:
        x = torch.ones(128, 128)
        repeats = _calibrated(x, world)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        cpu: list[float] = []
        for turn in range(2 * turns):
            beats = turn % 2 == 0
            began, used = time.perf_counter(), _cpu_of(beating) if beats else 0.0
            seconds[beats].append(_steps(x, repeats, steps, world))
            if beats:
                cpu.append((_cpu_of(beating) - used) / (time.perf_counter() - began))
            beating = _switched(beating, beats)
            world.barrier()
        return {"with": seconds[True], "without": seconds[False], "cpu": cpu}


def _switched(beating: Heart, beats: bool) -> Heart:
    """Stop the heartbeat, or start one like it."""
    if beats:
        beating.stop()
        return beating
    fresh = Heart(beating.board, beating.samples, index=beating.index, stack_file=beating.stack_file)
    fresh.start()
    fresh.steps_here = 100  # so that arrivals are sampled, too
    return fresh


def _cpu_of(beating: Heart) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(beating._thread.ident or 0))


def _calibrated(x: torch.Tensor, world: World) -> int:
    """Products per step, the same on all ranks."""
    began = time.perf_counter()
    for _ in range(50):
        x @ x
    mine = STEP / ((time.perf_counter() - began) / 50)
    return max(1, int(world.all_reduce_host([mine], "min").wait()[0]))


def _steps(x: torch.Tensor, repeats: int, steps: int, world: World) -> float:
    """The median step: products, and eight collectives of different sizes, as of a small model."""
    taken = []
    for number in range(steps):
        began = time.perf_counter()
        with begin_step(number):
            for _ in range(repeats):
                x @ x
            for size in (10, 100, 1000, 10_000) * 2:
                dist.all_reduce(torch.ones(size), group=world.control_group)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="of a turn")
    options = report.arguments(parser, turns=1, steps=5)
    found = launch(measure, (options.turns, options.steps), nproc=2)[0]
    ratios = sorted(on / off for on, off in zip(found["with"], found["without"], strict=True))
    rows = [
        {
            "step without, ms": f"{statistics.median(found['without']) * 1e3:.2f}",
            "with, ms": f"{statistics.median(found['with']) * 1e3:.2f}",
            "ratio of turns: median": f"{statistics.median(ratios):.4f}",
            "quartiles": f"{ratios[len(ratios) // 4]:.4f} to {ratios[3 * len(ratios) // 4]:.4f}",
            "CPU of the heartbeat": f"{statistics.median(found['cpu']):.3%} of a core",
        }
    ]
    print(report.table(rows))
    question = "What do heartbeats cost? Steps of about 10 ms on 2 ranks with eight all-reduces each."
    print(report.write("heartbeat", f"{report.heading('Heartbeats', question)}\n{report.table(rows)}"))


if __name__ == "__main__":
    main()
