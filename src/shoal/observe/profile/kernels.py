"""What the kernels of a GPU say: how long at least one of them ran, which took most, and how much communication shows.

compute   ████████░░░░███████░░░░░░    busy: the union of all intervals, whatever runs beside each other
NCCL      ░░░░██████████░░░░░░██░░░    exposed: communication while no other kernel runs
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.comm.profile.intervals import length, without

MOST = 10
"""Kernels that are listed."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of one kernel, in nanoseconds."""

    name: str
    begin: int
    end: int
    stream: int

    @property
    def is_communication(self) -> bool:
        """Whether NCCL has started it."""
        return self.name.startswith("nccl")


def gpu_use(kernels: Sequence[Kernel], *, steps: int, step_seconds: float) -> dict[str, Any]:
    """How a GPU is used in a step, as JSON values. `kernels` are those of `steps` steps that were traced, and
    `step_seconds` is a step that was not: tracing slows the host, and the kernels hardly."""
    spans = [(kernel.begin, kernel.end) for kernel in kernels]
    busy = length(spans) / 1e9 / steps
    sent = [(kernel.begin, kernel.end) for kernel in kernels if kernel.is_communication]
    others = [(kernel.begin, kernel.end) for kernel in kernels if not kernel.is_communication]
    return {
        "busy_seconds": busy,
        "utilization": min(1.0, busy / step_seconds),
        "kernels_per_step": len(kernels) / steps,
        "communication_seconds": length(sent) / 1e9 / steps,
        "exposed_seconds": without(sent, others) / 1e9 / steps,
        "kernels": top_kernels(kernels),
    }


def top_kernels(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """The kernels that take most of the time, by their short names."""
    times: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        name = short_name(kernel.name)
        times[name] += kernel.end - kernel.begin
        calls[name] += 1
    total = sum(times.values()) or 1
    ordered = sorted(times, key=lambda name: (-times[name], name))[:MOST]
    return [{"kernel": name, "calls": calls[name], "fraction": times[name] / total} for name in ordered]


def short_name(name: str) -> str:
    """The name of a kernel without its types, unless kernels of torch differ by them alone.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)")
    'vectorized_elementwise_kernel(CUDAFunctor_add)'
    >>> short_name(
    ...     "void at::native::elementwise_kernel<4, at::native::gpu_kernel_impl_nocast<direct_copy_kernel_cuda> >"
    ... )
    'elementwise_kernel(direct_copy_kernel_cuda)'
    >>> short_name("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN")
    'nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN'
    >>> short_name("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >(Params)")
    'flash_fwd_kernel'
    """
    head, _, types = name.removeprefix("void ").partition("<")
    short = head.partition("(")[0].rsplit("::", 1)[-1].strip()
    inner = re.search(r"(?!gpu_kernel_impl)\b(\w*(?:Functor|Op|Ops|_kernel_cuda|_kernel_impl)\w*)", types)
    return f"{short}({inner.group(1)})" if inner and "elementwise" in short else short or name
