"""Does a run on one GPU take the memory and the time that the planner predicts?

python benchmarks/planner/gpu.py [--cluster cluster.yaml] [--steps 8] [--set new] [--cases 0 5] [--dry]
python benchmarks/planner/gpu.py --set first --recorded benchmarks/results/planner_nvidia-h200_2026-11-15.md

First the machine is measured (`shoal calibrate`), then all is predicted and written to the result, and then every case
is trained for some steps on random tokens, in a process of its own, on an otherwise idle GPU.

memory    *predicted*: `PeakMemory.allocated`, what tensors take. *Measured*: `torch.cuda.max_memory_allocated` over all
          steps, the first one too, in which the compiler is at work
step      *predicted*: `StepTime.total` and its interval of 80 %. *Measured*: the median of the steps after the second,
          from one synchronisation to the next
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.blueprint.plan import Plan
from shoal.config.recipe import OptimSection
from shoal.models.llama import Llama, LlamaConfig
from shoal.models.moe import Moe, MoeConfig
from shoal.numerics.optim.build import build_optimizer
from shoal.parallel.lora.apply import lora
from shoal.planner.task import Task
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import cluster_from_yaml, parse_cluster
from shoal.predict.predict import Prediction
from shoal.predict.presets.frameworks import shoal_profile
from shoal.predict.workload import Workload
from shoal.train.run import Run

GIB = 2**30
MEMORY_BAR, WORST_MEMORY_BAR, TIME_BAR = 0.01, 0.03, 0.025
SETTLING = 2
"""Steps that do not count: the first one compiles, and in the second one AdamW changes to another kernel."""

LONGEST = 2**17
MODELS: dict[str, LlamaConfig] = {
    "1.1 B": LlamaConfig(
        hidden=2048, num_layers=22, num_heads=32, num_kv_heads=4, ffn=5632, vocabulary=32000, max_sequence=LONGEST
    ),
    "1.5 B": LlamaConfig(
        hidden=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn=8192, vocabulary=128256, max_sequence=LONGEST
    ),
    "2.8 B": LlamaConfig(
        hidden=2560, num_layers=32, num_heads=20, num_kv_heads=20, ffn=6912, vocabulary=50304, max_sequence=LONGEST
    ),
    "3.6 B": LlamaConfig(
        hidden=3072, num_layers=28, num_heads=24, num_kv_heads=8, ffn=8192, vocabulary=128256, max_sequence=LONGEST
    ),
    "8.0 B": LlamaConfig(
        hidden=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn=14336, vocabulary=128256, max_sequence=LONGEST
    ),
    "5.2 B, 16 experts": MoeConfig(
        hidden=2048, num_layers=24, num_heads=16, num_kv_heads=4, vocabulary=32768, num_experts=16, top_k=2,
        expert_ffn=2048, max_sequence=LONGEST,
    ),
    "0.7 B": LlamaConfig(
        hidden=1536, num_layers=20, num_heads=12, num_kv_heads=4, ffn=4096, vocabulary=65536, max_sequence=LONGEST
    ),
    "4.0 B": LlamaConfig(
        hidden=2560, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, ffn=9728, vocabulary=151936,
        max_sequence=LONGEST,
    ),
    "2.7 B, 64 experts": MoeConfig(
        hidden=1536, num_layers=12, num_heads=12, num_kv_heads=4, vocabulary=65536, num_experts=64, top_k=8,
        expert_ffn=704, max_sequence=LONGEST,
    ),
    "1.7 B, 32 experts": MoeConfig(
        hidden=1024, num_layers=16, num_heads=16, num_kv_heads=8, vocabulary=50304, num_experts=32, top_k=4,
        expert_ffn=1024, max_sequence=LONGEST,
    ),
    "2.0 B": LlamaConfig(
        hidden=2304, num_layers=24, num_heads=18, num_kv_heads=6, ffn=6144, vocabulary=100352, max_sequence=LONGEST
    ),
    "6.0 B": LlamaConfig(
        hidden=4096, num_layers=28, num_heads=32, num_kv_heads=8, ffn=12288, vocabulary=64000, max_sequence=LONGEST
    ),
    "2.5 B, 8 experts": MoeConfig(
        hidden=1536, num_layers=16, num_heads=12, num_kv_heads=4, vocabulary=32768, num_experts=8, top_k=2,
        expert_ffn=4096, max_sequence=LONGEST,
    ),
    "2.5 B, 128 experts": MoeConfig(
        hidden=1024, num_layers=12, num_heads=16, num_kv_heads=4, vocabulary=32768, num_experts=128, top_k=8,
        expert_ffn=512, max_sequence=LONGEST,
    ),
    "tiny": LlamaConfig(),
    "tiny, 8 experts": MoeConfig(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    model: str
    mb: int
    sequence: int
    recompute: str = "none"
    states: str = "fp32"
    """Of AdamW."""
    microbatches: int = 1
    """Of a step."""
    precision: str = "bf16"
    lora: int = 0
    """Rank of the adapters. 0: all is trained."""
    offload: str = "none"

    @property
    def words(self) -> str:
        """Its plan."""
        offload = "" if self.offload == "none" else f" offload={self.offload}"
        return f"mb={self.mb} {self.precision} recompute={self.recompute}{offload}"

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.mb * self.microbatches

    def __str__(self) -> str:
        times = f"{self.microbatches} x " if self.microbatches > 1 else ""
        said = f"{self.model}, {times}{self.mb} x {self.sequence:,}, {self.recompute}, {self.states} states"
        said += f", {self.precision}" * (self.precision != "bf16") + f", LoRA of rank {self.lora}" * (self.lora > 0)
        return said + f", offload={self.offload}" * (self.offload != "none")


SETS: dict[str, tuple[Case, ...]] = {
    "first": (
        Case("1.1 B", 8, 4096),
        Case("1.1 B", 2, 16384, "selective"),
        Case("1.5 B", 4, 1024),
        Case("1.5 B", 32, 1024),
        Case("1.5 B", 8, 4096),
        Case("1.5 B", 8, 4096, states="bf16"),
        Case("1.5 B", 16, 4096, "full"),
        Case("1.5 B", 1, 32768),
        Case("1.5 B", 1, 32768, "selective", "bf16"),
        Case("1.5 B", 1, 32768, "full"),
        Case("1.5 B", 2, 4096, microbatches=4),
        Case("2.8 B", 4, 4096),
        Case("2.8 B", 4, 8192, "full", "bf16"),
        Case("3.6 B", 4, 4096),
        Case("3.6 B", 2, 8192, "selective", "bf16"),
        Case("3.6 B", 1, 2048),
        Case("8.0 B", 2, 4096, states="bf16"),
        Case("8.0 B", 1, 8192, "selective", "bf16"),
        Case("8.0 B", 4, 4096, "full", "bf16"),
        Case("8.0 B", 1, 4096, "full", "fp32"),
        Case("5.2 B, 16 experts", 2, 4096),
        Case("5.2 B, 16 experts", 4, 4096, "full", "bf16"),
    ),
    "fit": (  # seen while the planner was mended
        Case("0.7 B", 16, 2048),
        Case("4.0 B", 2, 4096),
        Case("1.1 B", 4, 8192),
        Case("3.6 B", 2, 4096),
        Case("4.0 B", 4, 4096, "full"),
        Case("0.7 B", 8, 4096, "selective"),
        Case("1.5 B", 8, 4096, precision="fp8"),
        Case("4.0 B", 4, 4096, "full", "bf16", precision="fp8"),
        Case("8.0 B", 2, 4096, states="bf16", precision="fp8"),
        Case("2.7 B, 64 experts", 4, 4096),
        Case("1.7 B, 32 experts", 8, 2048),
        Case("5.2 B, 16 experts", 4, 2048),
        Case("8.0 B", 2, 4096, lora=16),
        Case("3.6 B", 8, 2048, lora=8),
        Case("1.5 B", 8, 4096, "full", lora=64),
        Case("8.0 B", 2, 4096, "full", offload="optimizer"),
        Case("3.6 B", 8, 4096, "full", offload="optimizer"),
    ),
    "later": (  # predicted before, with accumulation and experts as they were fitted to all others
        Case("2.0 B", 8, 2048),
        Case("2.0 B", 2, 8192),
        Case("6.0 B", 1, 4096),
        Case("6.0 B", 2, 2048),
        Case("1.1 B", 4, 4096),
        Case("0.7 B", 4, 16384),
        Case("3.6 B", 2, 4096, microbatches=2),
        Case("2.0 B", 4, 2048, microbatches=4),
        Case("6.0 B", 4, 4096, "full", "bf16"),
        Case("2.0 B", 8, 4096, "selective"),
        Case("4.0 B", 2, 8192, "full"),
        Case("1.5 B", 16, 4096, "selective"),
        Case("2.8 B", 1, 32768, "full"),
        Case("8.0 B", 8, 2048, "full", "bf16"),
        Case("2.0 B", 8, 4096, precision="fp8"),
        Case("6.0 B", 2, 4096, "selective", "bf16", precision="fp8"),
        Case("1.1 B", 8, 4096, precision="fp8"),
        Case("3.6 B", 4, 8192, "full", precision="fp8"),
        Case("8.0 B", 1, 8192, states="bf16", precision="fp8"),
        Case("2.5 B, 8 experts", 4, 4096),
        Case("2.5 B, 8 experts", 8, 2048, "full"),
        Case("2.5 B, 128 experts", 8, 4096),
        Case("5.2 B, 16 experts", 8, 2048, states="bf16"),
        Case("1.7 B, 32 experts", 16, 2048),
        Case("2.7 B, 64 experts", 2, 8192),
        Case("6.0 B", 4, 4096, lora=16),
        Case("2.0 B", 16, 2048, lora=64),
        Case("8.0 B", 4, 8192, "full", lora=8),
        Case("2.0 B", 8, 4096, offload="optimizer"),
        Case("3.6 B", 8, 2048, "full", offload="optimizer"),
    ),
    "new": (  # predicted before
        Case("0.7 B", 8, 8192),
        Case("1.1 B", 16, 2048),
        Case("1.5 B", 16, 2048),
        Case("2.8 B", 2, 8192),
        Case("3.6 B", 6, 2048),
        Case("4.0 B", 4, 2048),
        Case("1.5 B", 2, 16384),
        Case("2.8 B", 2, 4096, microbatches=4),
        Case("0.7 B", 32, 4096, "full"),
        Case("2.8 B", 8, 4096, "selective"),
        Case("4.0 B", 8, 2048, "selective", "bf16"),
        Case("8.0 B", 2, 8192, "full", "bf16"),
        Case("3.6 B", 16, 4096, "full"),
        Case("1.1 B", 1, 65536, "full"),
        Case("1.5 B", 16, 2048, precision="fp8"),
        Case("3.6 B", 4, 4096, precision="fp8"),
        Case("2.8 B", 4, 4096, precision="fp8"),
        Case("8.0 B", 4, 4096, "full", "bf16", precision="fp8"),
        Case("4.0 B", 2, 4096, precision="fp8"),
        Case("1.5 B", 1, 32768, precision="fp8"),
        Case("2.7 B, 64 experts", 8, 2048),
        Case("2.7 B, 64 experts", 8, 4096, "full"),
        Case("5.2 B, 16 experts", 2, 8192),
        Case("1.7 B, 32 experts", 4, 8192),
        Case("8.0 B", 4, 4096, lora=8),
        Case("4.0 B", 4, 4096, lora=32),
        Case("2.8 B", 8, 4096, "full", lora=16),
        Case("1.5 B", 8, 4096, lora=16),
        Case("1.5 B", 8, 4096, offload="optimizer"),
        Case("2.8 B", 4, 4096, offload="optimizer"),
    ),
}


# ---- on paper -------------------------------------------------------------------------------------------------------


def workload(config: LlamaConfig, rank: int) -> Workload:
    """A model on paper, with LoRA of a rank, or 0."""
    sparse = {}
    if isinstance(config, MoeConfig):
        sparse = {"experts": config.num_experts, "top_k": config.top_k, "expert_ffn": config.expert_ffn}
    return Workload(
        name="llama", hidden=config.hidden, layers=config.num_layers, heads=config.num_heads,
        kv_heads=config.num_kv_heads, ffn=config.ffn, vocabulary=config.vocabulary, head_dim=config.head_dim or 0,
        lora=rank, **sparse,
    )  # fmt: skip


def predicted(case: Case, cluster: Cluster) -> Prediction:
    """What the planner says of a run."""
    task = Task(
        workload=workload(MODELS[case.model], case.lora), cluster=cluster, sequence=case.sequence,
        global_batch=case.batch, profile=shoal_profile(state_dtype=case.states),
    )  # fmt: skip
    return task.predict(Plan.parse(case.words).resolve(1))


# ---- on the machine -------------------------------------------------------------------------------------------------


@contextmanager
def trained(case: Case) -> Iterator[Callable[[], float]]:
    """A run, as a function that takes a step of it and returns its seconds."""
    config = MODELS[case.model]
    with Run(case.words, compile=True) as run:
        run.prepare(built(config, case.lora, run.device))
        section = OptimSection(state_dtype=case.states)  # type: ignore[arg-type]
        run.prepare(build_optimizer(run.parameters, section, lr=1e-4, offload=case.offload))

        def step() -> float:
            drawn = torch.randint(config.vocabulary, (case.batch, case.sequence + 1))
            batch = {"tokens": pinned(drawn[:, :-1]), "labels": pinned(drawn[:, 1:])}
            synchronize()
            began = time.perf_counter()
            run.step(batch)
            synchronize()
            return time.perf_counter() - began

        yield step


def built(config: LlamaConfig, rank: int, device: torch.device) -> nn.Module:
    """The model with random weights, drawn on the device, where that takes no time."""
    with torch.device(device):
        model = Moe(config) if isinstance(config, MoeConfig) else Llama(config)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, generator)
    return lora(model, rank=rank) if rank else model


def pinned(x: Tensor) -> Tensor:
    """As shoal's loader gives it."""
    return x.contiguous().pin_memory() if torch.cuda.is_available() else x.contiguous()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one(case: Case, num_steps: int) -> dict[str, Any]:
    """Measure a case in this process."""
    with trained(case) as step:
        seconds = [step() for _ in range(num_steps)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return {"seconds": seconds, "peak": peak, "reserved": reserved}


def started(case: Case, num_steps: int) -> subprocess.Popen[str]:
    """Start a process that imports what it needs, and waits for a line before it touches the GPU."""
    words = [sys.executable, __file__, "--one", json.dumps(dataclasses.asdict(case)), "--steps", str(num_steps)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let the process run, and return what it measured, or its error."""
    out, problem = process.communicate("now\n")
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": next((line for line in reversed(problem.splitlines()) if "Error" in line), "no output")[:160]}


# ---- what is printed ------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What was measured of a case."""

    peak: float
    seconds: Sequence[float]
    """Of the steps that count."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def row(case: Case, paper: Prediction, found: Found | str | None) -> dict[str, str]:
    memory, step = paper.memory.allocated, paper.time
    said = {
        "run": str(case),
        "memory, predicted": f"{memory / GIB:.2f} GiB",
        "memory, measured": "-" if found is None else str(found)[:80],
        "apart by": "-",
        "step, predicted": f"{step.total * 1e3:.0f} ms ({step.low * 1e3:.0f} to {step.high * 1e3:.0f})",
        "step, measured": "-",
        "apart by ": "-",
    }
    if isinstance(found, Found):
        said["memory, measured"] = f"{found.peak / GIB:.2f} GiB"
        said["apart by"] = f"{memory / found.peak - 1:+.1%}"
        said["step, measured"] = f"{found.median * 1e3:.0f} ms"
        said["apart by "] = f"{step.total / found.median - 1:+.1%}"
    return said


def recorded(path: Path) -> dict[str, Found]:
    """What an earlier result measured, by run."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in path.read_text().splitlines()]
    return {
        cells[0]: Found(float(cells[2].removesuffix(" GiB")) * GIB, [float(cells[5].removesuffix(" ms")) / 1e3])
        for cells in rows
        if len(cells) == 7 and cells[2].endswith(" GiB") and cells[5].endswith(" ms")
    }


def verdict(papers: Sequence[Prediction], found: Sequence[Found | str | None]) -> str:
    """How far they are apart, and whether that is near enough."""
    pairs = [(paper, one) for paper, one in zip(papers, found, strict=True) if isinstance(one, Found)]
    if not pairs:
        return "Not run yet."
    memory = [abs(paper.memory.allocated / one.peak - 1) for paper, one in pairs]
    seconds = [abs(paper.time.total / one.median - 1) for paper, one in pairs]
    inside = [paper.time.low <= one.median <= paper.time.high for paper, one in pairs]
    failed = sum(isinstance(one, str) for one in found)
    mean, worst, mean_time = statistics.fmean(memory), max(memory), statistics.fmean(seconds)
    is_near = mean <= MEMORY_BAR and worst <= WORST_MEMORY_BAR
    return (
        f"{len(pairs)} runs, {failed} that failed. Memory: {mean:.1%} in the mean (bar {MEMORY_BAR:.0%}),"
        f" {worst:.1%} at worst (bar {WORST_MEMORY_BAR:.0%}): {'holds' if is_near else 'missed'}. Time: {mean_time:.1%}"
        f" in the mean (bar {TIME_BAR:.1%}), {max(seconds):.1%} at worst:"
        f" {'holds' if mean_time <= TIME_BAR else 'missed'};"
        f" {statistics.fmean(inside):.0%} of the steps are inside of their interval of 80 %."
    )


def causes(cases: Sequence[Case], papers: Sequence[Prediction]) -> str:
    """Where the planner thinks that memory and time go."""
    names = ("parameters", "gradients", "optimizer", "activations", "buffers", "logits")
    rows = []
    for case, paper in zip(cases, papers, strict=True):
        held = {name: getattr(paper.memory, name) / GIB for name in names}
        spent = {name: seconds * 1e3 for name, seconds in paper.time.causes().items()}
        rows.append(
            {
                "run": str(case),
                "GiB": ", ".join(f"{name} {size:.2f}" for name, size in held.items() if size >= 0.005),
                "ms": ", ".join(f"{name} {ms:.1f}" for name, ms in spent.items() if ms >= 0.05),
            }
        )
    return table(rows)


def result(
    cluster: Cluster,
    cases: Sequence[Case],
    papers: Sequence[Prediction],
    found: Sequence[Found | str | None],
    when: str,
) -> str:
    device = cluster.device
    question = (
        "Llamas and mixtures of experts on random tokens: `microbatches x sequences x tokens, recompute`; bf16 where"
        " nothing else is said, weights in float32 (with LoRA frozen ones in bfloat16), AdamW with states in float32 or"
        " bfloat16, compiled, no clipping. Memory: what tensors take at the fullest moment"
        " (`torch.cuda.max_memory_allocated`). A step is forward, backward and update; the median of those after the"
        f" second. All of it was predicted at {when}, before the first run."
    )
    rates = ", ".join(f"{word} {rate / 1e12:.0f}" for word, rate in device.achievable.items())
    return "\n".join(
        [
            heading("Predicted and measured, on one GPU", question),
            table([row(*three) for three in zip(cases, papers, found, strict=True)]),
            "",
            verdict(papers, found),
            "",
            f"The cluster: {cluster.source}. Products, fitted, TFLOP/s: {rates}. Attention, measured:"
            f" {device.attention.get('bf16', 0) / 1e12:.0f} TFLOP/s. Memory: {device.bandwidth / 1e12:.2f} TB/s,"
            f" element-wise work {device.bandwidth * device.streaming / 1e12:.2f} TB/s. Launches:"
            f" {device.host_factor:.1f} times the usual server's.",
            "",
            "Where it goes, predicted:",
            "",
            causes(cases, papers),
        ]
    )


def calibrated(path: Path) -> Cluster:
    """This machine, measured now by the command that a person would use."""
    command = [sys.executable, "-m", "shoal", "calibrate", "--out", str(path), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return cluster_from_yaml(path)


def compare(cases: Sequence[Case], cluster: Cluster, num_steps: int, *, theme: str, is_dry: bool) -> None:
    """Predict all, write it down, run all."""
    papers = [predicted(case, cluster) for case in cases]
    found: list[Found | str | None] = [None] * len(cases)
    when = time.strftime("%H:%M:%S")
    print(result(cluster, cases, papers, found, when), flush=True)
    if is_dry:
        return
    write(theme, result(cluster, cases, papers, found, when))
    waiting = started(cases[0], num_steps)
    for number, case in enumerate(cases):
        now = waiting
        if number + 1 < len(cases):
            waiting = started(cases[number + 1], num_steps)  # imports while this one computes
        measured = result_of(now)
        found[number] = (
            measured["error"] if "error" in measured else Found(measured["peak"], measured["seconds"][SETTLING:])
        )
        print(time.strftime("%H:%M:%S"), row(case, papers[number], found[number]), measured, flush=True)
        path = write(theme, result(cluster, cases, papers, found, when))
    print(verdict(papers, found))
    print("written to", path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", help="what `shoal calibrate` has written, or a preset; without it, measured now")
    parser.add_argument("--keep", type=Path, help="a YAML file to keep what was measured in")
    parser.add_argument("--set", choices=SETS, default="new", help="which cases")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of cases of that set, from 0")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dry", action="store_true", help="predict only")
    parser.add_argument("--recorded", type=Path, help="an earlier result: predict only, beside what it measured")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = arguments(parser, cluster="h200:1", cases=[0], dry=True)
    if args.one:
        sys.stdin.readline()
        print(json.dumps(one(Case(**json.loads(args.one)), args.steps)))
        return
    known = SETS[args.set]
    cases = [known[number] for number in (args.cases or range(len(known)))]
    if args.recorded:
        measured = recorded(args.recorded)
        papers = [predicted(case, parse_cluster(args.cluster or "h200:1")) for case in cases]
        found = [measured.get(str(case)) for case in cases]
        print(table([row(*three) for three in zip(cases, papers, found, strict=True)]), "", sep="\n")
        print(verdict(papers, found))
        return
    with tempfile.TemporaryDirectory() as folder:
        said, kept = args.cluster, args.keep or Path(folder) / "cluster.yaml"
        cluster = parse_cluster(said) if said else calibrated(kept)
    theme = "planner" if args.set in ("first", "new") else f"planner-{args.set}"
    compare(cases, cluster, args.steps, theme=theme, is_dry=args.dry)


if __name__ == "__main__":
    main()
