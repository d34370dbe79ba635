"""Adasum: add two gradients, less their common part.

    adasum(a, b) = (1 − a·b / 2|a|²) a + (1 − a·b / 2|b|²) b

Orthogonal gradients are added, parallel ones are averaged. Ranks combine in pairs at distances 1, 2, 4, ...; after
log2(n) exchanges all have the same value. (Maleki et al., "Scaling Distributed Training with Adaptive Summation".)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def adasum_(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Combine a contiguous tensor of every rank in place. The number of ranks must be a power of two."""
    if group is None or not tensor.numel():
        return
    me, distance = dist.get_rank(group), 1
    while distance < group.size():
        partner = me ^ distance
        theirs = _exchanged(tensor, partner, group)
        lower, upper = (tensor, theirs) if me < partner else (theirs, tensor)
        tensor.copy_(combine(lower, upper))  # the same order of operands on both ranks: equal bits
        distance *= 2


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return adasum(a, b). Products are summed in float64: squares of float16 overflow."""
    a64, b64 = a.double().reshape(-1), b.double().reshape(-1)
    dot, a_square, b_square = (torch.dot(x, y).item() for x, y in ((a64, b64), (a64, a64), (b64, b64)))
    a_factor = 1.0 - dot / (2.0 * a_square) if a_square > 0 else 1.0
    b_factor = 1.0 - dot / (2.0 * b_square) if b_square > 0 else 1.0
    return (a64 * a_factor + b64 * b_factor).reshape(a.shape).to(a.dtype)


def _exchanged(tensor: Tensor, partner: int, group: dist.ProcessGroup) -> Tensor:
    arrived = torch.empty_like(tensor)
    there = dist.get_global_rank(group, partner)
    operations = [dist.P2POp(dist.isend, tensor, there, group), dist.P2POp(dist.irecv, arrived, there, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return arrived
