"""Does the memory of attention fall as 1/cp, is it as predicted, and has every rank the same work?

python benchmarks/context/run.py [--tokens 8192,16384,32768] [--degrees 1,2,4]

One causal attention, forward and backward, over one sequence in float32: on one process, and over rings and with
Ulysses on several processes of this machine. Nothing but the attention keeps its queries, keys and values, as in a
model, where they are made by a projection that keeps its input only.

kept      *counted*: bytes of all storages that autograd saves from the forward to the backward, each once
peak      *measured*: the most memory of the process (VmHWM) in forward and backward, above what it had before its
          queries, keys and values were made; *predicted* by `blueprint.context_parallel` for tensors, and for torch's
          own buffers in the backward: a MiB a thread
pairs     *counted*: pairs of a query and a key that a rank's kernels were called for, of all heads
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.blueprint.context_parallel import AttentionMemory, attention_memory, cpu_kernel_bytes
from shoal.blueprint.plan import Plan
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.parallel.context.attention import Attention, ContextParallel

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32
MIB = 2**20
PEAK_BAR, BALANCE_BAR = 0.05, 1.05


# ---- an attention by itself -----------------------------------------------------------------------------------------


class Made(torch.autograd.Function):
    """Queries, keys or values out of nowhere: whoever takes them decides how long they live."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.zeros(()), None


class Lost(torch.autograd.Function):
    """The end of it: a number, and in the backward a gradient for the output, which is not kept. It lies in memory as a
    projection gives it, token by token, and so the kernel need not copy it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.shape = out.transpose(1, 2).shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.randn(ctx.shape).transpose(1, 2)


def forward(attention: Attention, num_tokens: int) -> Tensor:
    start = torch.zeros((), requires_grad=True)
    shapes = [(1, heads, num_tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    out = attention(*(Made.apply(start, shape) for shape in shapes))
    return Lost.apply(out)  # type: ignore[no-any-return]


# ---- what is counted and measured -----------------------------------------------------------------------------------


class Kept:
    """Storages that autograd saves."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


class Pairs(torch.overrides.TorchFunctionMode):
    """What the kernels of a forward are called for."""

    number = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "scaled_dot_product" in str(function) and "backward" not in str(function):
            (_, heads, queries, _), keys = args[0].shape, args[1].shape[2]
            is_causal = kwargs.get("is_causal", any(argument is True for argument in args[3:]))
            self.number += heads * (queries * (queries + 1) // 2 if is_causal else queries * keys)
        return function(*args, **kwargs)


def resident(name: str) -> int:
    """`VmRSS`: bytes of this process in memory now; `VmHWM`: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


GIVING_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",
    "MIMALLOC_EAGER_COMMIT": "0",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
}
"""Under these glibc's allocator, and mimalloc, which torch uses on Arm, take from the system what is used and give it
back as soon as it is freed: the peak of the process is that of its tensors."""


def give_back_at_once() -> None:
    """Start over under the allocators' settings, which they read when a process starts."""
    if not GIVING_BACK.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **GIVING_BACK})


class Found(NamedTuple):
    """On one rank."""

    kept: int
    peak: int
    pairs: int
    seconds: float
    cpu_seconds: float
    threads: int


def on_rank(placement: Placement, store: dist.Store, kind: str, tokens: int) -> Found:
    with World.start(placement, device="cpu", store=store) as world:
        attention = Attention()
        if world.size > 1:
            assert dist.group.WORLD is not None
            attention.context = ContextParallel(dist.group.WORLD, kind=kind, comm_device=world.device)  # type: ignore[arg-type]
        forward(attention, 4096 // world.size).backward()  # what comes into being once: threads, connections
        world.barrier()
        return measured(attention, tokens // world.size, world)


def measured(attention: Attention, num_tokens: int, world: World) -> Found:
    kept, pairs = Kept(), Pairs()
    before = resident("VmRSS")
    forget_peak()
    began, cpu_began = time.perf_counter(), time.process_time()
    with kept.hooks, pairs:
        loss = forward(attention, num_tokens)
    loss.backward()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    peak = resident("VmHWM") - before
    world.barrier()  # no rank leaves while another still waits for a message
    return Found(kept.num_bytes, peak, pairs.number, seconds, cpu_seconds, torch.get_num_threads())


# ---- what is printed ------------------------------------------------------------------------------------------------


def predicted(kind: str, degree: int, tokens: int) -> AttentionMemory:
    words = f"fp32 cp={degree} {kind if degree > 1 else ''}"
    return attention_memory(
        Plan.of(words).resolve(degree), samples=1, tokens=tokens, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, size_bytes=4,
    )  # fmt: skip


def row(kind: str, degree: int, tokens: int, alone: list[Found]) -> tuple[dict[str, str], list[Found]]:
    ranks = launch(on_rank, (kind, tokens), nproc=degree)
    paper = predicted(kind, degree, tokens)
    kept, peak = max(rank.kept for rank in ranks), max(rank.peak for rank in ranks)
    kernel = cpu_kernel_bytes(tokens // degree, ranks[0].threads)
    peak_on_paper = max(paper.peak_forward, paper.peak_backward + kernel)
    one = (alone or ranks)[0]
    cells = {
        "tokens": f"{tokens:,}",
        "context": kind if degree > 1 else "-",
        "cp": str(degree),
        "kept, counted": f"{kept / MIB:.2f} MiB",
        "predicted": f"{paper.kept / MIB:.2f} MiB",
        "of cp=1": f"{kept / one.kept:.3f}",
        "peak, measured": f"{peak / MIB:.1f} MiB",
        "peak, predicted": f"{peak_on_paper / MIB:.1f} MiB",
        "apart by": f"{peak / peak_on_paper - 1:+.1%} ({(peak - peak_on_paper) / MIB:+.1f} MiB)",
        "peak of cp=1": f"{peak / one.peak:.3f}",
        "pairs, max / mean": f"{max(r.pairs for r in ranks) / statistics.fmean(r.pairs for r in ranks):.3f}",
        "pairs, sum of cp=1": f"{sum(r.pairs for r in ranks) / one.pairs:.3f}",
        "slowest rank": f"{max(rank.seconds for rank in ranks):.1f} s",
        "CPU time, all ranks": f"{sum(rank.cpu_seconds for rank in ranks):.1f} s",
        "CPU time, max / mean": (
            f"{max(r.cpu_seconds for r in ranks) / statistics.fmean(r.cpu_seconds for r in ranks):.2f}"
        ),
    }
    return cells, ranks


def result(rows: list[dict[str, str]], load: float) -> str:
    question = (
        f"One causal attention of {HEADS} heads ({KV_HEADS} of keys and values) of {HEAD_DIM} features, one sequence,"
        " float32, forward and backward, on the rank that has most. Bars: measured peaks within"
        f" {PEAK_BAR:.0%} of the predicted ones, in which torch's kernel has its MiB per thread, and pairs max / mean"
        f" at most {BALANCE_BAR}."
        f" Load average of the machine before the run: {load:.1f}."
    )
    return "\n".join([heading("Context parallelism", question), table(rows)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="8192,16384,32768")
    parser.add_argument("--degrees", default="1,2,4")
    asked = arguments(parser, tokens="128", degrees="1,2")
    give_back_at_once()
    degrees = [int(degree) for degree in asked.degrees.split(",")]
    load, rows = os.getloadavg()[0], []
    for tokens in map(int, asked.tokens.split(",")):
        alone: list[Found] = []
        for kind in ("ring", "ulysses"):
            for degree in degrees:
                if degree == 1 and alone:
                    continue
                cells, ranks = row(kind, degree, tokens, alone)
                alone = ranks if degree == 1 else alone
                rows.append(cells)
                print(cells, flush=True)
        print("written to", write("context", result(rows, load)))  # so that whoever has to stop keeps the shorter ones
    print(result(rows, load))


if __name__ == "__main__":
    main()
