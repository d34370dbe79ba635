"""Norms of gradients in bfloat16 on a GPU, at memory bandwidth; torch's `_foreach_norm` takes twice as long.

Every program sums the squares of its share of a tensor, and writes the sum. The sums are added in a fixed order, so the
same gradients have the same norm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8
_PROGRAMS = 1024
"""Maximum number of programs for one tensor."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _squares(x, sums, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([block], dtype=tl.float32)
    first_of_all = tl.program_id(0).to(tl.int64) * block  # int64: the step after the last may exceed 2^31
    for first in range(first_of_all, size, tl.num_programs(0) * block):
        places = first + tl.arange(0, block)
        values = tl.load(x + places, mask=places < size, other=0.0).to(tl.float32)
        total += values * values
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def norms_in_one_pass(gradients: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each gradient, in float32."""
    sums = torch.zeros((len(gradients), _PROGRAMS), dtype=torch.float32, device=gradients[0].device)
    for gradient, row in zip(gradients, sums.unbind(), strict=True):
        programs = min(_PROGRAMS, triton.cdiv(gradient.numel(), _BLOCK))
        if programs:
            launch: Any = _squares[(programs,)]
            launch(gradient, row, gradient.numel(), block=_BLOCK, num_warps=_WARPS)
    return list(sums.sum(1).sqrt().unbind())
