"""Which kernel of attention is the fastest on this GPU, forward and backward, and how far is it from the limit?

python benchmarks/h200/attention.py [--floor 785]

All kernels are called as `run.attention` does. FlashAttention 4 needs the extra `fa4`. The kernels take turns, so that
a change of the clock affects all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

from shoal.errors import ShoalError
from shoal.numerics.ops.attention_kernels import Backend, attended

PROTOCOL = (
    "Causal attention in bfloat16 with shared keys, as the compiled model calls it (heads beside each other in memory)."
    " FLOPs count half of all pairs, forward 4 and backward 10 per feature. The share is of the rate of a large"
    " product, which is the floor of the roofline table. The error is that of the worst gradient against float64, over"
    " its largest value. *Measured*, medians of turns."
)


@dataclass(frozen=True)
class Shape:
    """One call of attention."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    features: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.heads}/{self.kv_heads} heads of {self.features}"

    @property
    def forward_flops(self) -> float:
        return 4 * self.batch * self.tokens**2 * self.heads * self.features / 2


SHAPES = [
    Shape(8, 4096, 32, 8, 64),
    Shape(4, 4096, 24, 8, 128),
    Shape(2, 4096, 32, 8, 128),
    Shape(8, 4096, 16, 16, 128),
    Shape(1, 32768, 32, 8, 64),
    Shape(1, 32768, 32, 8, 128),
]
SMOKE = [Shape(1, 64, 4, 2, 16)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU is for --smoke."""
KERNELS: dict[str, Backend] = {"cuDNN": "cudnn", "FlashAttention 2": "flash", "FlashAttention 4": "fa4"}


def inputs(shape: Shape) -> list[Tensor]:
    """Queries, keys, values and a gradient: (B, T, N, H) in memory, seen as (B, N, T, H)."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    drawn = (
        torch.randn(shape.batch, shape.tokens, n, shape.features, device=DEVICE, generator=generator) for n in heads
    )
    return [x.to(torch.bfloat16).transpose(1, 2) for x in drawn]


def called(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(q, k, v, causal=True, backend=KERNELS[kernel])


def seconds_of(function: Callable[[], object], calls: int) -> float:
    if DEVICE == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - began) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def error_of(kernel: str, shape: Shape) -> float:
    """Of the worst gradient, at 512 tokens."""
    small = Shape(1, min(shape.tokens, 512), shape.heads, shape.kv_heads, shape.features)
    *own, gradient = inputs(small)
    leaves = [x.detach().requires_grad_() for x in own]
    found = torch.autograd.grad(called(kernel, *leaves), leaves, gradient)
    exact = [x.double().requires_grad_() for x in own]
    with sdpa_kernel([SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(out, exact, gradient.double())
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))


def measure(shape: Shape, kernels: list[str], turns: int, calls: int) -> dict[str, tuple[float, float]]:
    """Kernel → seconds of forward and of backward."""
    *own, gradient = inputs(shape)
    leaves = [x.detach().requires_grad_() for x in own]
    found: dict[str, list[tuple[float, float]]] = {kernel: [] for kernel in kernels}
    for turn in range(turns + 1):
        for kernel in kernels:
            with torch.no_grad():
                forward = seconds_of(lambda kernel=kernel: called(kernel, *leaves), calls)
            out = called(kernel, *leaves)
            backward = seconds_of(lambda out=out: torch.autograd.grad(out, leaves, gradient, retain_graph=True), calls)
            if turn:
                found[kernel].append((forward, backward))
    return {name: tuple(statistics.median(x) for x in zip(*each, strict=True)) for name, each in found.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--floor", type=float, default=785, help="TFLOP/s of a large product")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    args = arguments(parser, turns=1, calls=1)
    rows = []
    for shape in SMOKE if args.smoke else SHAPES:
        kernels = []
        errors = {}
        for kernel in KERNELS:
            try:
                errors[kernel] = error_of(kernel, shape)
                kernels.append(kernel)
            except (RuntimeError, ShoalError) as problem:
                print(f"{kernel}: {problem!r}"[:1500], flush=True)
        for kernel, (forward, backward) in measure(shape, kernels, args.turns, args.calls).items():
            rate = 3.5 * shape.forward_flops / (forward + backward) / 1e12
            rows.append(
                {
                    "shape": str(shape),
                    "kernel": kernel,
                    "forward, ms": f"{forward * 1e3:.2f}",
                    "backward, ms": f"{backward * 1e3:.2f}",
                    "TFLOP/s": f"{rate:.0f}",
                    "of the floor": f"{rate / args.floor:.1%}",
                    "error": f"{errors[kernel]:.1e}",
                }
            )
            print(rows[-1], flush=True)
    packages = ("flash-attn-4", "nvidia-cudnn-cu13")
    print(
        write(
            "h200-attention", heading("One GPU: kernels of attention", PROTOCOL, packages=packages) + "\n" + table(rows)
        )
    )


if __name__ == "__main__":
    main()
