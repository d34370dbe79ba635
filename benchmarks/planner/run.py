"""Does a plan take the memory and the time that the planner predicts, on this machine's CPU?

python benchmarks/planner/run.py --cpu [--cluster cluster.yaml] [--rounds 2] [--steps 4]

A llama of four layers is trained with two processes under six plans: DDP, ZeRO-1, 2 and 3, tensor and pipeline
parallel. Everything is predicted first, and written to the result, before anything of it is run.

memory    *predicted*: `PeakMemory.allocated` of the rank that holds most, its tensors. *Measured*: the most memory of
          the process (VmHWM) in two steps after the first, above what it had when it had trained a tiny model under
          the same plan; of the rank that has most
step      *predicted*: `StepTime.total` and its interval of 80 %, on the cluster that `shoal calibrate` has measured
          just before, or that was given. *Measured*: the median of all steps of all rounds but each round's first
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.bench.calibrate import calibrate
from shoal.bench.fit_cluster import cluster_of
from shoal.blueprint.plan import Plan
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import OptimSection
from shoal.launch.local import launch
from shoal.models import llama
from shoal.numerics.optim.build import build_optimizer
from shoal.planner.task import Task
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.predict import Prediction
from shoal.predict.presets.frameworks import shoal_profile
from shoal.predict.workload import Workload
from shoal.train.run import Run

PLANS = {
    "DDP": "fp32 dp_replicate=2 mb=1",
    "ZeRO-1": "fp32 zero=1 mb=1",
    "ZeRO-2": "fp32 zero=2 mb=1",
    "ZeRO-3": "fp32 zero=3 mb=1",
    "tensor parallel": "fp32 tp=2 mb=1",
    "pipeline parallel": "fp32 pp=2 1f1b mb=1",
}
NUM_RANKS = 2
SEED, CLIP = 0, 1.0
MIB = 2**20
MEMORY_BAR, TIME_BAR = 0.05, 0.20


class Shape(NamedTuple):
    """A model, and what it is trained on."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1536
    vocabulary: int = 4096
    sequence: int = 512
    batch: int = 4
    """Sequences of a step, of all ranks together."""

    def build(self) -> llama.Llama:
        """The model, without memory."""
        with torch.device("meta"):
            return llama.build(
                num_layers=self.layers, hidden=self.hidden, num_heads=self.heads, num_kv_heads=self.kv_heads,
                ffn=self.ffn, vocabulary=self.vocabulary, max_sequence=self.sequence, tied=False, preset="tiny",
            )  # fmt: skip

    def workload(self) -> Workload:
        """The model, on paper."""
        return Workload(
            name="llama", hidden=self.hidden, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads,
            ffn=self.ffn, vocabulary=self.vocabulary,
        )  # fmt: skip


SHAPE = Shape()
TINY = Shape(hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=256, sequence=32)


# ---- on paper -------------------------------------------------------------------------------------------------------


def predictions(cluster: Cluster, shape: Shape) -> dict[str, Prediction]:
    """Name of a plan → what the planner says of it."""
    task = Task(
        workload=shape.workload(), cluster=cluster, sequence=shape.sequence, global_batch=shape.batch,
        profile=shoal_profile(compile=False),
    )  # fmt: skip
    return {name: task.predict(Plan.parse(words).resolve(NUM_RANKS)) for name, words in PLANS.items()}


# ---- on the machine -------------------------------------------------------------------------------------------------


class Trainer:
    """A model under a plan, as a loop of one's own trains it."""

    def __init__(self, world: World, words: str, shape: Shape) -> None:
        self.run, self.shape = Run(words, world=world, clip=CLIP, seed=SEED), shape
        self.run.prepare(shape.build())
        self.run.prepare(build_optimizer(self.run.parameters, OptimSection(), lr=1e-3))

    def step(self, number: int) -> float:
        """One step; seconds."""
        batch = self._batch(number)
        self.run.world.barrier()
        began = time.perf_counter()
        self.run.step(batch).item()
        return time.perf_counter() - began

    def _batch(self, number: int) -> dict[str, Tensor]:
        """This rank's share of random tokens."""
        generator = torch.Generator().manual_seed(number * self.run.degree + self.run.coordinate)
        size = (self.shape.batch // self.run.degree, self.shape.sequence + 1)
        drawn = torch.randint(self.shape.vocabulary, size, generator=generator)
        return {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def seconds_on_rank(placement: Placement, store: dist.Store, words: str, shape: Shape, num_steps: int) -> list[float]:
    """Of every step but the first."""
    with World.start(placement, device="cpu", store=store) as world:
        trainer = Trainer(world, words, shape)
        return [trainer.step(number) for number in range(num_steps + 1)][1:]


def peak_on_rank(placement: Placement, store: dist.Store, words: str, shape: Shape) -> int:
    """Bytes above those of the same process with a tiny model."""
    with World.start(placement, device="cpu", store=store) as world:
        warm = Trainer(world, words, TINY)
        for number in range(2):
            warm.step(number)
        before = resident("VmRSS")
        trainer = Trainer(world, words, shape)
        for number in range(3):
            trainer.step(number)
            if number == 0:  # while a model is filled, other things are there
                forget_peak()
        peak = resident("VmHWM") - before
        world.barrier()  # no rank leaves while another still waits for a message
        return peak


def resident(name: str) -> int:
    """`VmRSS`: bytes of this process in memory now; `VmHWM`: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Others:
    """How busy other processes keep the cores, from now on."""

    def __init__(self) -> None:
        self.began, self.busy = time.perf_counter(), self._busy()

    @staticmethod
    def _busy() -> float:
        """CPU seconds of the machine that are not those of this process and of its children that have ended."""
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
        return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])

    @property
    def part(self) -> float:
        cores = os.cpu_count() or 1
        return max(0.0, self._busy() - self.busy) / (time.perf_counter() - self.began) / cores


GIVING_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",
    "MIMALLOC_EAGER_COMMIT": "0",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
}
"""Under these glibc's allocator, and mimalloc, which torch uses on Arm, take from the system what is used and give it
back as soon as it is freed: the peak of the process is that of its tensors. It costs time, so time is measured without,
and a process reads them when it starts, so memory is measured in one of its own."""


def peaks(shape: Shape, names: list[str]) -> dict[str, list[int]]:
    """Name of a plan → bytes of every rank at its fullest moment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peaks.json"
        command = [sys.executable, __file__, "--cpu", "--peaks-to", str(path), "--shape", json.dumps(shape)]
        subprocess.run([*command, "--plans", *names], env={**os.environ, **GIVING_BACK}, check=True)
        found: dict[str, list[int]] = json.loads(path.read_text())
        return found


# ---- what is printed ------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What was measured of a plan."""

    peaks: list[int]
    seconds: list[float]

    @property
    def peak(self) -> int:
        return max(self.peaks)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def row(name: str, paper: Prediction, found: Found | None) -> dict[str, str]:
    memory, step = paper.memory.allocated, paper.time
    cells = {
        "plan": f"{name}: `{PLANS[name]}`",
        "memory, predicted": f"{memory / MIB:.0f} MiB",
        "memory, measured": "-",
        "apart by": "-",
        "step, predicted": f"{step.total:.2f} s ({step.low:.2f} to {step.high:.2f})",
        "step, measured: median (range)": "-",
        "apart by ": "-",
    }
    if found is not None:
        cells["memory, measured"] = f"{found.peak / MIB:.0f} MiB"
        cells["apart by"] = f"{memory / found.peak - 1:+.1%}"
        if found.seconds:
            spread = f"{min(found.seconds):.2f} to {max(found.seconds):.2f}"
            cells["step, measured: median (range)"] = f"{found.median:.2f} s ({spread}; {len(found.seconds)} steps)"
            cells["apart by "] = f"{step.total / found.median - 1:+.1%}"
    return cells


def causes(papers: Mapping[str, Prediction]) -> str:
    """Where the planner thinks that memory and time go."""
    rows = []
    for name, paper in papers.items():
        held = {
            cause: getattr(paper.memory, cause) / MIB
            for cause in ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits")
        }
        spent = {cause: seconds for cause, seconds in paper.time.causes().items() if seconds >= 0.005}
        rows.append(
            {
                "plan": name,
                "MiB": ", ".join(f"{cause} {size:.0f}" for cause, size in held.items() if size >= 0.5),
                "seconds": ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in spent.items()),
            }
        )
    return table(rows)


def result(
    cluster: Cluster,
    papers: Mapping[str, Prediction],
    found: Mapping[str, Found],
    shape: Shape,
    when: str,
    others: float,
) -> str:
    parameters = shape.workload().parameters
    question = (
        f"A llama of {parameters:,} parameters ({shape.layers} layers, {shape.hidden} features,"
        f" {shape.vocabulary} words) in float32, AdamW, clipping, {shape.batch} sequences of {shape.sequence} tokens a"
        f" step, on {NUM_RANKS} processes with a thread each. Memory: what tensors take on the fullest rank; measured"
        " as the most memory of the process above that of the same process with a tiny model. Bars: memory within"
        f" {MEMORY_BAR:.0%}, time within {TIME_BAR:.0%}. Predicted at {when}, before the first run. Other"
        f" processes used {others:.0%} of the cores while time was measured."
    )
    lines = [
        heading("Predicted and measured, on a CPU", question),
        table([row(n, p, found.get(n)) for n, p in papers.items()]),
    ]
    device, link = cluster.device, cluster.inside
    lines += ["", f"{verdict(papers, found)}."] if found else ["", "Not run yet."]
    lines += [
        "",
        f"The cluster: {cluster.source}. Measured: products in fp32 {device.rate('fp32') / 1e9:.1f} GFLOP/s (fitted),"
        f" attention {device.attention.get('fp32', 0) / 1e9:.1f} GFLOP/s, element-wise work"
        f" {device.bandwidth * device.streaming / 1e9:.1f} GB/s, messages"
        f" {(link.base + link.latency) * 1e3:.2f} ms and {link.bandwidth / 1e9:.2f} GB/s,"
        f" {link.gathering:.0%} of that in gathers and scatters (fitted).",
        "",
        "Where it goes, predicted:",
        "",
        causes(papers),
    ]
    return "\n".join(lines)


def verdict(papers: Mapping[str, Prediction], found: Mapping[str, Found]) -> str:
    """How far the worst are apart, and whether that is near enough."""
    memory = {name: abs(papers[name].memory.allocated / one.peak - 1) for name, one in found.items()}
    seconds = {name: abs(papers[name].time.total / one.median - 1) for name, one in found.items() if one.seconds}
    parts = []
    for what, errors, bar in (("memory", memory, MEMORY_BAR), ("time", seconds, TIME_BAR)):
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            word = "holds" if errors[worst] <= bar else "missed"
            mean = statistics.fmean(errors.values())
            parts.append(f"{what}: worst {errors[worst]:.1%} ({worst}), mean {mean:.1%}, bar {bar:.0%}: {word}")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cpu",
        action="store_true",
        required="--smoke" not in sys.argv,
        help="on this machine's CPU, with two processes",
    )
    parser.add_argument("--cluster", help="what `shoal calibrate` has written; without it, it is measured now")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long to measure the machine")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a round; 0: measure memory only")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--shape", type=json.loads, default=list(SHAPE), help="of the model, as a JSON list")
    parser.add_argument("--no-result", action="store_true", help="print it only")
    parser.add_argument("--peaks-to", type=Path, help=argparse.SUPPRESS)
    args = arguments(parser, cluster="cpu:2x1", rounds=1, steps=1, plans=["DDP"], shape=[1, 32, 2, 2, 64, 64, 16, 2])
    shape = Shape(*args.shape)
    if args.peaks_to:
        measured = {n: launch(peak_on_rank, (PLANS[n], shape), nproc=NUM_RANKS) for n in args.plans}
        args.peaks_to.write_text(json.dumps(measured))
        return
    compare(args, shape)


def compare(arguments: Any, shape: Shape) -> None:
    if arguments.cluster:
        cluster = parse_cluster(arguments.cluster)
    else:
        cluster = cluster_of(calibrate(nproc=NUM_RANKS, device="cpu", seconds=arguments.seconds, quiet=True))
    papers = {name: paper for name, paper in predictions(cluster, shape).items() if name in arguments.plans}
    when = time.strftime("%H:%M:%S")

    def shown(found: Mapping[str, Found], others: float = 0.0) -> str:
        text = result(cluster, papers, found, shape, when, others)
        if not arguments.no_result:
            write("planner", text)
        return text

    print(shown({}), flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in papers}
    others = Others()
    for _ in range(arguments.rounds if arguments.steps else 0):
        for name in papers:  # in turns, so that what disturbs the machine for a while disturbs all of them
            ranks = launch(seconds_on_rank, (PLANS[name], shape, arguments.steps), nproc=NUM_RANKS)
            seconds[name] += [max(step) for step in zip(*ranks, strict=True)]
    part = others.part
    found = {name: Found(sizes, seconds[name]) for name, sizes in peaks(shape, list(papers)).items()}
    print(shown(found, part))


if __name__ == "__main__":
    main()
