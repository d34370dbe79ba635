"""Ulysses attention: ranks exchange tokens for heads, attend to full sequences, and exchange back.

                 before               inside               after
    rank 0       tokens 0-3, all      all tokens,          tokens 0-3, all
                 heads                heads 0 and 1        heads
    rank 1       tokens 4-7, all      all tokens,          tokens 4-7, all
                 heads                heads 2 and 3        heads

Inside it is ordinary attention, with any kernel that the device has. Queries, keys and values are sent in one message,
the output in another; the backward sends as much. There can be no more ranks than heads. If there are fewer key/value
heads than ranks, they are repeated first, so that each rank gets those that its query heads share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.blueprint.context_parallel import repeated_kv_heads
from shoal.comm.autograd_function import differentiable_once

_all_to_all: Any = dist.all_to_all_single


@torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between ranks are not part of a graph
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: Any,
    comm_device: torch.device,
) -> Tensor:
    """Attend to the keys of all ranks. `attention` is that of one device; heads and tokens are dims 1 and 2."""
    degree = group.size()
    times = repeated_kv_heads(k.shape[1], degree) // k.shape[1]
    if times > 1:
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    sizes = [x.shape[1] // degree for x in (q, k, v)]
    packed = torch.cat([x.unflatten(1, (degree, -1)) for x in (q, k, v)], dim=2)  # B, rank, heads, T, H
    mine = _exchanged(packed.movedim(1, 0), group, comm_device)  # rank, B, heads, T, H
    full = mine.movedim(0, 2).flatten(2, 3)  # B, heads, rank x T, H
    out = attention(*full.split(sizes, dim=1))
    parts = out.unflatten(2, (degree, -1)).movedim(2, 0)
    back = _exchanged(parts, group, comm_device)  # rank, B, heads, T, H
    return back.movedim(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, group: Any, comm_device: torch.device) -> Tensor:
    """Exchange parts along dim 0: part t goes to rank t, and the parts addressed to me are returned."""
    result: Tensor = _Exchange.apply(parts, group, comm_device)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """Its own transpose: the gradient of what came from a rank goes back to it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any, comm_device: torch.device) -> Tensor:
        ctx.group, ctx.comm_device = group, comm_device
        return _exchange(parts, group, comm_device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return _exchange(grads[0], ctx.group, ctx.comm_device), None, None


def _exchange(parts: Tensor, group: Any, comm_device: torch.device) -> Tensor:
    sent = parts.to(comm_device).contiguous()
    received = torch.empty_like(sent)
    _all_to_all(received, sent, group=group)
    return received.to(parts.device)
