"""What do heartbeats cost? Steps of 10 ms on 2 ranks, in short blocks with and without one heartbeat, in one run.

    with      | step | step |     each rank writes one heartbeat at a random moment of the first step, and
                  ▲ beat, turn    the launcher makes one turn: it reads them, and looks at the processes
    without   | step | step |     no thread and no process is woken

Two such blocks are a pair, in an order from a seed, with a barrier before each. Processes, memory and cores are the
same in both. So the difference of a pair is the time that one period of a run (0.2 s) loses, and noise: of all pairs
the median is reported, with the interval that holds it in 95 % of 2,000 resamples. Whole runs, or longer blocks, differ
by more than ten times that from what else happens on a machine.

Three costs are too small or too rare for pairs, and are timed by themselves: the calls around each step; to count a
message between two ranks; and a sample of arrivals, every ten seconds.

Two kinds of pairs show that a difference would be found, and only if there is one: heartbeats that take 2 ms more, 1 %
of the time, and no heartbeats in either block. The exit code is 1 if the bar is exceeded, and 3 if the intervals are
too wide to tell, or these two are not as expected.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.heartbeat.heart import PERIOD, SAMPLE_EVERY, Heart, begin_step, heart
from shoal.comm.heartbeat.messages import MessageCounter
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch import worker_group
from shoal.launch.local import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

STEP = 0.010
"""Seconds of a step, of which most are computation."""
BAR = 0.005
"""The share of a step that heartbeats may cost."""
BLOCK, SETTLE = 2, 1
"""Measured steps of a block, and steps before them."""
RESAMPLES = 2000


BOTH, HEARTBEAT, SLOWER, NOTHING = (
    "heartbeats and the launcher",
    "heartbeats alone",
    "both, 2 ms more a heartbeat (control)",
    "nothing (control)",
)
KINDS = (BOTH, HEARTBEAT, BOTH, SLOWER, BOTH, NOTHING)
"""What is in one block of a pair, and not in the other, by turns."""
MORE = 0.002


@dataclass
class Found:
    """What one rank has measured, in seconds."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Of each pair, the block with a heartbeat and that without."""
    beats: float = 0.0
    """CPU time of a heartbeat."""
    per_step: float = 0.0
    """Of the calls around a step."""
    per_message: float = 0.0
    """To count a message."""
    per_sample: float = 0.0
    """CPU time of a sample of arrivals."""


class Beater:
    """A thread that writes a heartbeat when it is told to, in place of the one that writes five in a second."""

    def __init__(self, beating: Heart) -> None:
        self.beating, self.cpu, self.beats = beating, 0.0, 0
        self._orders: list[tuple[float, float] | None] = []
        self._wake = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def beat_after(self, delay: float, more: float) -> None:
        """Write a heartbeat after some seconds, and then compute for `more`."""
        self._orders.append((delay, more))
        self._wake.release()

    def end(self) -> None:
        """End the thread."""
        self._orders.append(None)
        self._wake.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            order = self._orders.pop()
            if order is None:
                return
            time.sleep(order[0])
            began = time.thread_time()
            self.beating.beat()
            self.cpu += time.thread_time() - began
            self.beats += 1
            until = time.perf_counter() + order[1]
            while time.perf_counter() < until:
                pass


class Steps:
    """The training steps of one rank."""

    def __init__(self, world: World) -> None:
        self.world, self.number = world, 0
        self.x, self.gradient, self.repeats = torch.ones(128, 128), torch.zeros(10_000), 10

    def calibrate(self) -> None:
        """Choose the products of a step, the same on all ranks, so that a whole one takes `STEP`."""
        for _ in range(5):
            (slowest,) = self.world.all_reduce_host([self.make(20) / 20], "max").wait()
            self.repeats = max(1, round(self.repeats * STEP / slowest))

    def make(self, num: int) -> float:
        """Seconds of some steps: products, and the sum of a small gradient."""
        began = time.perf_counter()
        for _ in range(num):
            self.number += 1
            with begin_step(self.number):
                for _ in range(self.repeats):
                    self.x @ self.x
                dist.all_reduce(self.gradient, group=self.world.control_group)
        return time.perf_counter() - began


def measure(place: Placement, store: dist.Store, seconds: float, seed: int, gate: str) -> Found:
    """The blocks of one rank, and the costs that are timed by themselves. `gate`: the pipe to the launcher, which makes
    a turn on each order."""
    beating = heart()
    assert beating is not None
    with World.start(place, device="cpu", store=store, threads=1) as world, open(gate, "wb", buffering=0) as orders:
        steps, found, drawn = Steps(world), Found(), random.Random(seed)
        steps.calibrate()
        beating.stop()
        beater = Beater(beating)
        if place.rank == 0:
            orders.write(bytes(4))  # from now on, the launcher makes turns on order
        deadline = time.monotonic() + seconds
        while not found.pairs or len(found.pairs) % len(KINDS) or not _is_over(deadline, world):
            kind, blocks = KINDS[len(found.pairs) % len(KINDS)], {}
            for has_beat in drawn.sample((True, False), 2):
                beat_after, turn_after = drawn.uniform(0.0, STEP), drawn.uniform(0.0, STEP)
                world.barrier()
                steps.make(SETTLE)
                began = time.perf_counter()
                if has_beat and kind != NOTHING:
                    beater.beat_after(beat_after, MORE if kind == SLOWER else 0.0)
                if has_beat and kind in (BOTH, SLOWER) and place.rank == 0:
                    orders.write(int(turn_after * 1e6).to_bytes(4, "little"))
                steps.make(BLOCK)
                blocks[has_beat] = time.perf_counter() - began
            found.pairs.append((blocks[True], blocks[False]))
        beater.end()
        found.beats = beater.cpu / max(1, beater.beats)
        found.per_step = timed(_empty_step, times=2000)
        work = dist.all_reduce(torch.ones(1), group=world.control_group, async_op=True)
        assert work is not None
        work.wait()
        found.per_message = timed(lambda: MESSAGES.note(world.control_group, 0, 1, work), times=2000)
        found.per_sample = timed(beating._sample_arrivals, times=20)
        world.barrier()
        return found


MESSAGES = MessageCounter()


def _is_over(deadline: float, world: World) -> bool:
    return world.all_reduce_host([float(time.monotonic() > deadline)], "max").wait()[0] > 0


def _empty_step() -> None:
    with begin_step(7):
        pass


def timed(call: Callable[[], Any], times: int) -> float:
    """CPU seconds of a call in this thread, the mean of some."""
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times


def turns_on_order(gate: int) -> Callable[..., list[Any]]:
    """The function by which the launcher waits for workers, and for its next turn. After the first order, it makes no
    turn without one."""
    wait, is_gated = worker_group.wait, False

    def waiting(workers: list[Any], timeout: float) -> list[Any]:
        nonlocal is_gated
        ready = wait([*workers, gate], 5.0 if is_gated else timeout)
        if gate in ready:
            ready.remove(gate)
            order = os.read(gate, 4)
            if order:
                is_gated = True
                time.sleep(int.from_bytes(order, "little") * 1e-6)
            else:  # no rank has opened the pipe yet, or all have closed it
                time.sleep(0.01)
        return ready

    return waiting


def interval(values: list[float], of: Callable[[list[float]], float], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of a statistic over resamples with replacement."""
    drawn = random.Random(seed)
    found = sorted(of(drawn.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def verdict(low: float, high: float) -> str:
    """Whether the bar holds."""
    return "holds" if high <= BAR else "exceeded" if low > BAR else "not resolved"


def rows_of(ranks: list[Found]) -> list[dict[str, str]]:
    """A row for each kind of pairs. A block is as long as that of its slower rank."""
    rare = max(each.per_step / STEP + each.per_sample / SAMPLE_EVERY for each in ranks)
    rows = []
    for kind in (BOTH, HEARTBEAT, SLOWER, NOTHING):
        pairs = [
            each for number, each in enumerate(zip(*(r.pairs for r in ranks), strict=True)) if kind == KINDS[number % 6]
        ]
        lost = [max(on for on, _ in pair) - max(off for _, off in pair) for pair in pairs]
        low, high = interval(lost, statistics.median)
        mean_low, mean_high = interval(lost, statistics.fmean)
        always = 0.0 if kind == NOTHING else rare
        shares = [each / PERIOD + always for each in (statistics.median(lost), low, high)]
        rows.append(
            {
                "in one block of a pair": kind,
                "pairs": str(len(lost)),
                "a period loses, µs: median": f"{statistics.median(lost) * 1e6:.0f}",
                "95 %": f"{low * 1e6:.0f} to {high * 1e6:.0f}",
                "mean": f"{statistics.fmean(lost) * 1e6:.0f}",
                "its 95 %": f"{mean_low * 1e6:.0f} to {mean_high * 1e6:.0f}",
                "of the time, with all that is timed by itself": f"{shares[0]:.2%}",
                "95 % of it": f"{shares[1]:.2%} to {shares[2]:.2%}",
                f"at most {BAR:.1%}": verdict(shares[1], shares[2]),
            }
        )
    return rows


def timed_apart(ranks: list[Found]) -> str:
    """The costs that are timed by themselves."""
    beat, per_step, per_message, per_sample = (
        statistics.fmean(getattr(rank, name) * 1e6 for rank in ranks)
        for name in ("beats", "per_step", "per_message", "per_sample")
    )
    return (
        f"Timed by themselves, in µs of CPU time: a heartbeat {beat:.0f} ({beat * 1e-6 / PERIOD:.3%} of a core), the"
        f" calls around a step {per_step:.1f} (two notes of a phase, and the number of the step), a message between two"
        f" ranks {per_message:.1f}, a sample of arrivals every {SAMPLE_EVERY:g} s {per_sample:.0f}. Collectives are"
        f" recorded by torch, with and without heartbeats."
    )


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--seed", type=int, default=1)
    options = report.arguments(parser, seconds=0.0)
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder, "gate")
        os.mkfifo(gate)
        reader = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
        worker_group.wait = turns_on_order(reader)  # type: ignore[assignment]
        ranks = launch(measure, (options.seconds, options.seed, str(gate)), nproc=2)
        os.close(reader)
    rows = rows_of(ranks)
    step = statistics.median(without for rank in ranks for _, without in rank.pairs) / BLOCK * 1e3
    question = (
        f"What do heartbeats cost? Steps of {step:.1f} ms on 2 ranks with an all-reduce each, pairs of blocks of"
        f" {BLOCK} steps, seed {options.seed}; the load average was {os.getloadavg()[0]:.1f}."
    )
    text = f"{report.table(rows)}\n\n{timed_apart(ranks)}"
    print(question, text, sep="\n")
    print(report.write("heartbeat", f"{report.heading('Heartbeats', question)}\n{text}"))
    both, _, slower, nothing = (row[f"at most {BAR:.1%}"] for row in rows)
    if options.smoke:
        return 0
    return 1 if both == "exceeded" else 0 if (both, slower, nothing) == ("holds", "exceeded", "holds") else 3


if __name__ == "__main__":
    sys.exit(main())
