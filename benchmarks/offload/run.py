"""How near is a step with `offload=optimizer` to its floor?

python benchmarks/offload/run.py [--shape 8b] [--micro-batch 2] [--peer] [--smoke]

The floor of a step is its forward and backward, and then the longest of three that can run side by side: gradients to
the host, AdamW on the host, weights to the device. All are measured in this process. `--peer`: DeepSpeed's ZeRO-Offload
before it, in a process of its own, on the same shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "h200"))
from report import arguments, heading, table, write
from systems import DEVICE, SHAPES, Shape, drawn, peak_gib, synchronize

from shoal.config.recipe import OptimSection
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.offload.page_locked import PageLocked
from shoal.numerics.optim.build import build_optimizer
from shoal.train.run import Run

GIB = 2**30
ON_HOST = 12
"""Bytes of a parameter in host memory: its copy and two states."""


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


def update_rate(numel: int) -> float:
    """Parameters/s of torch's fused AdamW in host memory."""
    weight = nn.Parameter(torch.zeros(numel))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return numel / seconds_of(optimizer.step)


def measured_steps(shape: Shape, micro_batch: int, sequence: int, steps: int) -> dict[str, float]:
    """Seconds of a step and of its update, and the most memory on the device, with the optimizer in host memory."""
    config = LlamaConfig(
        hidden=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        ffn=shape.ffn, vocabulary=shape.vocabulary, max_sequence=sequence,
    )  # fmt: skip
    with Run(f"mb={micro_batch} bf16 offload=optimizer", compile=DEVICE == "cuda") as run:
        with torch.device(DEVICE):
            model = drawn(Llama(config))
        run.prepare(model)
        run.prepare(build_optimizer(run.parameters, OptimSection(), lr=1e-4, offload="optimizer"))
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
        }


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
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--probe", type=int, default=2**29, help="parameters of the floor's update")
    parser.add_argument("--peer", action="store_true", help="measure DeepSpeed's ZeRO-Offload as well")
    given = arguments(parser, shape="tiny", micro_batch=1, sequence=16, steps=1, probe=2**16)
    shape = SHAPES[given.shape]
    beside = peer(given.shape, given.micro_batch, given.sequence) if given.peer else []
    to_host, to_device = link_rates(2 * given.probe)
    rate = update_rate(given.probe)
    found = measured_steps(shape, given.micro_batch, given.sequence, given.steps)
    side_by_side = {
        "gradients to the host": 4 * shape.parameters / to_host,
        "AdamW on the host": shape.parameters / rate,
        "weights to the device": 4 * shape.parameters / to_device,
    }
    floor = found["compute"] + max(side_by_side.values())
    rows = [
        {"what": "forward and backward", "seconds": f"{found['compute']:.3f}", "how": "step without its update"},
        *(
            {"what": name, "seconds": f"{seconds:.3f}", "how": how}
            for (name, seconds), how in zip(
                side_by_side.items(),
                (f"{to_host / 1e9:.1f} GB/s", f"{rate / 1e9:.2f} billion parameters/s", f"{to_device / 1e9:.1f} GB/s"),
                strict=True,
            )
        ),
        {"what": "floor", "seconds": f"{floor:.3f}", "how": "the first, and the longest of the other three"},
        {"what": "update", "seconds": f"{found['update']:.3f}", "how": "measured by itself"},
        {"what": "step", "seconds": f"{found['step']:.3f}", "how": f"floor / step = {floor / found['step']:.3f}"},
        *beside,
    ]
    tokens = given.micro_batch * given.sequence
    title = f"Offload: {shape.parameters / 1e9:.2f} B parameters, {given.micro_batch} x {given.sequence} tokens"
    question = (
        f"`offload=optimizer`, weights and AdamW states in float32, products in bfloat16, *measured*:"
        f" {tokens / found['step']:,.0f} tokens/s, {found['gib']:.1f} GiB on the device,"
        f" {shape.parameters * ON_HOST / GIB:.0f} GiB of copies and states in host memory,"
        f" {torch.get_num_threads()} threads."
    )
    text = "\n".join([heading(title, question), table(rows)])
    print(text)
    print("written to", write("offload-peer" if given.peer else "offload", text), flush=True)


if __name__ == "__main__":
    main()
