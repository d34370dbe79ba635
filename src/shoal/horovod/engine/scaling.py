"""Multiply and divide tensors in place as Horovod does: integers in float64 towards zero, half precision in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.horovod.reduce_ops import ReduceOp

_HALVES = (torch.float16, torch.bfloat16)


def multiply_(tensor: Tensor, factor: float) -> None:
    """Multiply in place."""
    if factor == 1.0:
        return
    if not tensor.is_floating_point():
        tensor.copy_(tensor.double() * factor)
    elif tensor.dtype in _HALVES and tensor.device.type == "cpu":
        tensor.copy_(tensor.float() * factor)
    else:
        tensor.mul_(factor)


def finish_(tensor: Tensor, op: int, postscale: float, num_ranks: int) -> None:
    """Apply the division of an average and the factor after the reduction, in place."""
    if op != ReduceOp.AVERAGE:
        multiply_(tensor, postscale)
    elif postscale != 1.0:
        multiply_(tensor, postscale / num_ranks)
    elif tensor.is_floating_point():
        tensor.div_(num_ranks)
    else:
        tensor.copy_(tensor.div(num_ranks, rounding_mode="trunc"))
