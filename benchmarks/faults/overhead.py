"""What do heartbeats cost? Training-like steps of 10 ms on 2 ranks, with and without them, by turns in one run.

Turns are short and in the order with, without, without, with, so that what other programs do is the same for both. A
ratio is that of two turns beside each other; of all ratios the median is taken, of seconds and of CPU seconds.
"""

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

from shoal.comm.heartbeat.heart import Heart, begin_step, heart
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

STEP = 0.010
"""Seconds of a step, of which most are computation."""
ORDER = (True, False, False, True)
"""Whether hearts beat in each turn."""


def measure(place: Placement, store: dist.Store, seconds: float, steps: int) -> dict[str, Any]:
    """Seconds and CPU seconds of a step with and without heartbeats in each turn, and the CPU time of its thread."""
    beating = heart()
    assert beating is not None
    with World.start(place, device="cpu", store=store, threads=1) as world:
        x = torch.ones(128, 128)
        repeats = _calibrated(x, world)
        found: dict[str, list[float]] = {name: [] for name in ("with", "without", "cpu with", "cpu without", "thread")}
        deadline, number = time.monotonic() + seconds, 0
        while number < len(ORDER) or number % len(ORDER) or not _is_over(deadline, world):
            beats = ORDER[number % len(ORDER)]
            beating = _switched(beating, beats)
            world.barrier()
            thread, began = _cpu_of(beating) if beats else 0.0, time.perf_counter()
            wall, cpu = _steps(x, repeats, steps, world)
            if beats:
                found["thread"].append((_cpu_of(beating) - thread) / (time.perf_counter() - began))
            name = "with" if beats else "without"
            found[name].append(wall)
            found[f"cpu {name}"].append(cpu)
            number += 1
        return found


def _is_over(deadline: float, world: World) -> bool:
    return world.all_reduce_host([float(time.monotonic() > deadline)], "max").wait()[0] > 0


def _switched(beating: Heart, beats: bool) -> Heart:
    """Stop the heartbeat, or start one like it, unless it is so already."""
    if beating._thread.is_alive() == beats:
        return beating
    if not beats:
        beating.stop()
        return beating
    fresh = Heart(beating.board, beating.samples, index=beating.index, stack_file=beating.stack_file)
    fresh._sample, fresh.steps_here = beating._sample, 100  # so that arrivals are sampled, as often as in a run
    fresh.start()
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


def _steps(x: torch.Tensor, repeats: int, steps: int, world: World) -> tuple[float, float]:
    """The median step, and the CPU time of a mean one: products, and eight collectives, as of a small model."""
    taken, cpu = [], time.process_time()
    for number in range(steps):
        began = time.perf_counter()
        with begin_step(number):
            for _ in range(repeats):
                x @ x
            for size in (10, 100, 1000, 10_000) * 2:
                dist.all_reduce(torch.ones(size), group=world.control_group)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken), (time.process_time() - cpu) / steps


def ratios(found: dict[str, list[float]], prefix: str = "") -> list[float]:
    """With over without, of turns beside each other, in order."""
    pairs = zip(found[f"{prefix}with"], found[f"{prefix}without"], strict=True)
    return sorted(on / off for on, off in pairs)


def quartiles(values: list[float]) -> str:
    """The middle half of sorted values."""
    return f"{values[len(values) // 4]:.4f} to {values[3 * len(values) // 4]:.4f}"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    options = report.arguments(parser, seconds=0.0, steps=5)
    began, used = time.perf_counter(), time.process_time()
    found = launch(measure, (options.seconds, options.steps), nproc=2)[0]
    launcher = (time.process_time() - used) / (time.perf_counter() - began)
    wall, cpu = ratios(found), ratios(found, "cpu ")
    rows = [
        {
            "step without, ms": f"{statistics.median(found['without']) * 1e3:.2f}",
            "ratio of time: median": f"{statistics.median(wall):.4f}",
            "quartiles": quartiles(wall),
            "ratio of CPU time: median": f"{statistics.median(cpu):.4f}",
            "its quartiles": quartiles(cpu),
            "CPU of the heartbeat": f"{statistics.fmean(found['thread']):.3%} of a core",
            "CPU of the launcher": f"{launcher:.3%} of a core",
        }
    ]
    question = (
        f"What do heartbeats cost? Steps of about 10 ms on 2 ranks with eight all-reduces each, {len(wall)} pairs of"
        f" turns of {options.steps} steps; the load average was {os.getloadavg()[0]:.1f}."
    )
    print(question, report.table(rows), sep="\n")
    print(report.write("heartbeat", f"{report.heading('Heartbeats', question)}\n{report.table(rows)}"))


if __name__ == "__main__":
    main()
