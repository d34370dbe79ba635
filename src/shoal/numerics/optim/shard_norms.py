"""Norms of whole tensors whose rows are sharded over ranks, all of them in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.numerics.optim.whole_matrices import shard_group


def full_norms(parameters: Sequence[Tensor], *shards: Sequence[Tensor]) -> list[list[float]]:
    """Return the norms of whole tensors, summed in float64: for each list of shards a list. The host waits once.

    `shards` are this rank's pieces of tensors that are cut as the `parameters` are.
    """
    squares = torch.stack([torch.stack(torch._foreach_norm(list(each))).double() for each in shards]).square()
    together: dict[dist.ProcessGroup, list[int]] = {}
    for number, parameter in enumerate(parameters):
        if (group := shard_group(parameter)) is not None:
            together.setdefault(group, []).append(number)
    for group, numbers in together.items():
        squares[:, numbers] = all_reduce(squares[:, numbers], group)
    norms: list[list[float]] = squares.sqrt().tolist()
    return norms
