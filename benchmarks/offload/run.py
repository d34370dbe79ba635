"""How near is a step with `offload=optimizer` to its floor? Does a model train whose weights are in host memory?

python benchmarks/offload/run.py [--shape 8b] [--micro-batch 2] [--peer] [--smoke]
python benchmarks/offload/run.py --offload parameters --shape 13b --micro-batch 8 --narrow

The floor of a step is its forward and backward, and then the longest of three that can run side by side: gradients to
the host, AdamW on the host, weights to the device. All are measured in this process. `--peer`: DeepSpeed's ZeRO-Offload
before it, in a process of its own, on the same shape. With `--offload parameters` weights cross the link twice and
gradients once, beside forward and backward: there the floor is the longer of these copies and the products, at the rate
of a large one, and then AdamW. `--narrow`: weights and states in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "h200"))
from report import arguments, heading, table, write
from systems import DEVICE, SHAPES, Shape, drawn, peak_gib, synchronize

from shoal.blueprint.plan import Plan
from shoal.config.recipe import OptimSection
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.offload.page_locked import PageLocked
from shoal.numerics.optim.adamw import AdamW
from shoal.numerics.optim.build import build_optimizer
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.presets.frameworks import shoal_profile
from shoal.predict.workload import Workload
from shoal.train.run import Run

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and how."""

    shape: Shape
    micro_batch: int
    sequence: int
    offload: str
    is_narrow: bool

    @property
    def words(self) -> str:
        """Its plan."""
        more = " zero=3 recompute=full" if self.offload == "parameters" else ""
        return f"mb={self.micro_batch} bf16 offload={self.offload}{more}"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, gradients and states."""
        return torch.bfloat16 if self.is_narrow else torch.float32

    @property
    def on_host(self) -> int:
        """Bytes of a parameter in host memory: its copy and two states; and its gradient, where that is whole there."""
        return self.dtype.itemsize * (4 if self.offload == "parameters" else 3)

    @property
    def section(self) -> OptimSection:
        """The optimizer of a recipe."""
        kind: Literal["fp32", "bf16"] = "bf16" if self.is_narrow else "fp32"
        return OptimSection(param_dtype=kind, state_dtype=kind)

    def predicted_gib(self) -> float:
        """What the planner says of the device's memory."""
        shape, kind = self.shape, self.section
        workload = Workload(
            name="llama", hidden=shape.hidden, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads,
            ffn=shape.ffn, vocabulary=shape.vocabulary,
        )  # fmt: skip
        task = Task(
            workload=workload, cluster=parse_cluster("h200:1"), sequence=self.sequence, global_batch=self.micro_batch,
            profile=shoal_profile(state_dtype=kind.state_dtype, param_dtype=kind.param_dtype),
        )  # fmt: skip
        return task.predict(Plan.parse(self.words).resolve(1)).memory.allocated / GIB


def seconds_of(work: Callable[[], object], rounds: int = 3) -> float:
    """The median of some rounds, after one that does not count."""
    taken = []
    for _ in range(rounds + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def link_rates(size: int) -> tuple[float, float]:
    """Bytes/s from the device to page-locked memory, and back."""
    memory = PageLocked()
    host = memory.empty((size,), torch.uint8, for_device=torch.device(DEVICE)).zero_()
    device = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    to_host = seconds_of(lambda: host.copy_(device, non_blocking=True))
    to_device = seconds_of(lambda: device.copy_(host, non_blocking=True))
    return size / to_host, size / to_device


def update_rate(numel: int, dtype: torch.dtype) -> float:
    """Parameters/s of AdamW in host memory: torch's fused one, or shoal's in bfloat16."""
    weight = nn.Parameter(torch.zeros(numel, dtype=dtype))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer: Optimizer = torch.optim.AdamW([weight], fused=True)
    if dtype == torch.bfloat16:
        optimizer = AdamW([weight], lr=1e-3, state_dtype="bf16")
    return numel / seconds_of(optimizer.step)


def product_rate() -> float:
    """FLOP/s of a large product in bfloat16, with random numbers."""
    size = 8192 if DEVICE == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return 20 * 2 * size**3 / seconds_of(lambda: [a @ b for _ in range(20)])


def measured_steps(case: Case, steps: int) -> dict[str, float]:
    """Seconds of a step and of its update, and the most memory on the device and of this process."""
    shape, micro_batch, sequence = case.shape, case.micro_batch, case.sequence
    config = LlamaConfig(
        hidden=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        ffn=shape.ffn, vocabulary=shape.vocabulary, max_sequence=sequence,
    )  # fmt: skip
    with Run(case.words, compile=DEVICE == "cuda", param_dtype=case.section.param_dtype) as run:
        with torch.device(DEVICE):
            model = drawn(Llama(config))
        run.prepare(model)
        run.prepare(build_optimizer(run.parameters, case.section, lr=1e-4, offload=case.offload))
        target = run.host_copies or run.optimizer
        update, updates = target.step, []

        def timed_update() -> None:
            synchronize()
            began = time.perf_counter()
            update()
            synchronize()
            updates.append(time.perf_counter() - began)

        whole = []
        for number in range(2 * steps + 1):  # first as it is, then with the update by itself
            if number == steps + 1:
                target.step = timed_update  # type: ignore[method-assign]
            tokens = torch.randint(0, shape.vocabulary, (micro_batch, sequence + 1), device=DEVICE)
            batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            synchronize()
            began = time.perf_counter()
            run.step(batch)
            synchronize()
            whole.append(time.perf_counter() - began)
        timed = statistics.median(whole[steps + 1 :]), statistics.median(updates)
        return {
            "step": statistics.median(whole[1 : steps + 1]),
            "compute": timed[0] - timed[1],
            "update": timed[1],
            "gib": peak_gib(),
            "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        }


def floor_of(case: Case, compute: float, link: tuple[float, float], rate: float) -> list[tuple[str, float, str]]:
    """What a step is made of at best, in seconds, with how it was found; the last is the floor."""
    to_host, to_device = link
    size, words = case.shape.parameters * case.dtype.itemsize, f"{rate / 1e9:.2f} billion parameters/s"
    passes = 2 if case.offload == "parameters" else 1
    copies = [
        ("gradients to the host", size / to_host, f"{to_host / 1e9:.1f} GB/s"),
        ("weights to the device", passes * size / to_device, f"{passes} times, {to_device / 1e9:.1f} GB/s"),
    ]
    update = ("AdamW on the host", case.shape.parameters / rate, words)
    if case.offload == "parameters":
        fastest = product_rate()
        flops = 8 * case.shape.parameters * case.micro_batch * case.sequence  # with the forward that is computed again
        products = ("products", flops / fastest, f"at {fastest / 1e12:.0f} TFLOP/s")
        floor = max(products[1], *(seconds for _, seconds, _ in copies)) + update[1]
        return [products, *copies, update, ("floor", floor, "the longest of the first three, and AdamW")]
    floor = compute + max(update[1], *(seconds for _, seconds, _ in copies))
    return [*copies, update, ("floor", floor, "forward and backward, and the longest of the other three")]


def peer(shape: str, micro_batch: int, sequence: int) -> list[dict[str, str]]:
    """The row of DeepSpeed, or why there is none."""
    script = Path(__file__).parent / "deepspeed_peer.py"
    words = ["--shape", shape, "--micro-batch", str(micro_batch), "--sequence", str(sequence)]
    ended = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return [{"what": "DeepSpeed", "seconds": "", "how": (ended.stderr.splitlines() or ["no answer"])[-1][:200]}]
    result = json.loads(lines[-1])
    how = f"{result['tokens_per_s']:,.0f} tokens/s, {result['gib']:.1f} GiB on the device"
    return [{"what": f"DeepSpeed {result['version']}, a step", "seconds": f"{result['step']:.3f}", "how": how}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--offload", default="optimizer", choices=("optimizer", "parameters"))
    parser.add_argument("--narrow", action="store_true", help="weights, gradients and states in bfloat16")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--probe", type=int, default=2**29, help="parameters of the floor's update")
    parser.add_argument("--peer", action="store_true", help="measure DeepSpeed's ZeRO-Offload as well")
    given = arguments(parser, shape="tiny", micro_batch=1, sequence=16, steps=1, probe=2**16)
    case = Case(SHAPES[given.shape], given.micro_batch, given.sequence, given.offload, given.narrow)
    beside = peer(given.shape, given.micro_batch, given.sequence) if given.peer else []
    link = link_rates(2 * given.probe)
    rate = update_rate(given.probe, case.dtype)
    found = measured_steps(case, given.steps)
    floor = floor_of(case, found["compute"], link, rate)
    rows = [
        {"what": "forward and backward", "seconds": f"{found['compute']:.3f}", "how": "step without its update"},
        *({"what": name, "seconds": f"{seconds:.3f}", "how": how} for name, seconds, how in floor),
        {"what": "update", "seconds": f"{found['update']:.3f}", "how": "measured by itself"},
        {
            "what": "step",
            "seconds": f"{found['step']:.3f}",
            "how": f"floor / step = {floor[-1][1] / found['step']:.3f}",
        },
        *beside,
    ]
    tokens, parameters = given.micro_batch * given.sequence, case.shape.parameters
    predicted = case.predicted_gib()
    title = f"Offload: {parameters / 1e9:.2f} B parameters, {given.micro_batch} x {given.sequence} tokens"
    question = (
        f"`{case.words}`, weights and AdamW states in {str(case.dtype).removeprefix('torch.')}, products in bfloat16,"
        f" *measured*: {tokens / found['step']:,.0f} tokens/s; {found['gib']:.2f} GiB on the device, *predicted*"
        f" {predicted:.2f}; {found['host']:.1f} GiB of host memory for this process, of it *counted*"
        f" {parameters * case.on_host / GIB:.1f} of tensors; {torch.get_num_threads()} threads."
    )
    text = "\n".join([heading(title, question), table(rows)])
    print(text)
    theme = f"offload-{given.offload}" if given.offload != "optimizer" else "offload-peer" if given.peer else "offload"
    print("written to", write(theme, text), flush=True)


if __name__ == "__main__":
    main()
