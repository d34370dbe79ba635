"""Ring attention: every rank keeps its queries, and the keys and values of all ranks come by.

    rank 0   kv0 ──▶ kv2 ──▶ kv1            while a rank computes with one block of keys and values, it passes that
    rank 1   kv1 ──▶ kv0 ──▶ kv2            block on and receives the next: c - 1 messages, of which none is waited
    rank 2   kv2 ──▶ kv1 ──▶ kv0            for if a block takes longer to compute than to send

What each rank computes in which step is `blueprint.attention.ring_steps`: with the zig-zag order every step of every
rank is the same amount of work. The backward goes round once more. Beside the keys and values travel their gradients,
one step behind: whoever has used a block adds to its gradient and passes it on, until it comes home (gradients of block
0, c = 3; rank 0 keeps what it finds itself):

    rank 1 (step 1) ──▶ rank 2 (step 2) ──▶ rank 0

torch has `context_parallel`, which replaces attention behind the model's back, needs its buffers listed by hand, and
runs on CUDA alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.blueprint.context_parallel import RingStep, ring_steps
from shoal.comm.autograd_function import differentiable_once
from shoal.numerics.ops.attention import Attended, attend, attend_backward, merge_
from shoal.numerics.precision import wide

KEYS_AND_VALUES, GRADIENTS = 0, 1
"""Tags: two messages are on their way from one rank to the next at a time."""


class Ring(Protocol):
    """The ranks that keys and values go round."""

    group: dist.ProcessGroup
    wire: torch.device
    """Where a tensor has to be to be sent."""
    index: int
    degree: int

    def indices(self, num_tokens: int, index: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Where in a whole sequence the tokens of a rank are."""


@dataclass
class Exchange:
    """A block on its way to the next rank, and another one coming from the rank before."""

    works: list[dist.Work]
    sent: Tensor
    """Kept until it has left."""
    received: Tensor
    device: torch.device

    @classmethod
    def start(cls, block: Tensor, ring: Ring, tag: int) -> Exchange:
        """Begin to pass a block on."""
        sent = block.to(ring.wire).contiguous()
        received = torch.empty_like(sent)
        after, before = (ring.index + 1) % ring.degree, (ring.index - 1) % ring.degree
        send = dist.P2POp(dist.isend, sent, group=ring.group, tag=tag, group_peer=after)
        receive = dist.P2POp(dist.irecv, received, group=ring.group, tag=tag, group_peer=before)
        return cls(dist.batch_isend_irecv([send, receive]), sent, received, block.device)

    def finish(self) -> Tensor:
        """Wait for what comes."""
        for work in self.works:
            work.wait()
        return self.received.to(self.device)


def around(block: Tensor, ring: Ring, causal: bool) -> Iterator[tuple[RingStep, Tensor]]:
    """The blocks of all ranks, mine first; while one is used, the next is on its way."""
    for number, step in enumerate(ring_steps(ring.index, ring.degree, causal)):
        is_last = number == ring.degree - 1
        coming = None if is_last else Exchange.start(block, ring, KEYS_AND_VALUES)
        yield step, block
        if coming is not None:
            block = coming.finish()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between ranks are no part of a graph
def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring, *, causal: bool) -> Tensor:
    """My queries to the keys of all ranks. `documents` (B, whole sequence): a query sees keys of its own only."""
    out: Tensor = _RingAttention.apply(q, k, v, documents, ring, causal)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring, causal: bool
    ) -> Tensor:
        keys_values = torch.stack([k, v])
        total: Attended | None = None
        for step, block in around(keys_values, ring, causal):
            some_k, some_v = _some(block, step.keys, 3)
            part = attend(_some(q, step.queries, 2), some_k, some_v, **_sight(step, documents, ring, causal))
            if total is None:
                total = Attended(part.out.to(wide(q.dtype)), part.lse)
            else:
                merge_(Attended(*(_some(x, step.queries, 2) for x in total)), part)
            del part  # before the next one is made
        assert total is not None
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, out, total.lse, documents)
        ctx.ring, ctx.causal = ring, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        q, keys_values, out, lse, documents = ctx.saved_tensors
        ring, dtype = ctx.ring, wide(q.dtype)
        d_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        d_own = torch.zeros(keys_values.shape, dtype=dtype, device=q.device)
        coming: Exchange | None = None
        for step, block in around(keys_values, ring, ctx.causal):
            grad, some_q, some_out, some_lse = (_some(x, step.queries, 2) for x in (grads[0], q, out, lse))
            some_k, some_v = _some(block, step.keys, 3)
            whole, sight = Attended(some_out, some_lse), _sight(step, documents, ring, ctx.causal)
            dq, *d_kv = attend_backward(grad, some_q, some_k, some_v, whole, **sight)
            _some(d_q, step.queries, 2).add_(dq)
            del dq
            is_mine = step.source == ring.index
            # Of another's block: what the ranks between its own and this one have found comes with it.
            d_block = d_own if is_mine else torch.zeros_like(d_own) if coming is None else coming.finish()
            for gradient in _some(d_block, step.keys, 3):
                gradient.add_(d_kv.pop(0))
            if not is_mine:
                coming = Exchange.start(d_block, ring, GRADIENTS)
        del block, some_k, some_v
        if coming is not None:
            d_own.add_(coming.finish())
        d_k, d_v = d_own.to(q.dtype)
        return d_q.to(q.dtype), d_k, d_v, None, None, None


def _some(x: Tensor, which: str, dim: int) -> Tensor:
    """All tokens, or those of the early or the late chunk; a view."""
    half = x.shape[dim] // 2
    return x if which == "all" else x.narrow(dim, half if which == "late" else 0, half)


def _sight(step: RingStep, documents: Tensor | None, ring: Ring, causal: bool) -> dict[str, Any]:
    """What the queries of a step may see of its keys: a flag is enough, unless samples are packed."""
    if documents is None:
        return {"is_causal": step.is_causal}
    num_tokens, device = documents.shape[1], documents.device
    of_queries = _some(ring.indices(num_tokens, ring.index, device), step.queries, 0)
    of_keys = _some(ring.indices(num_tokens, step.source, device), step.keys, 0)
    mask_BTS = documents[:, of_queries, None] == documents[:, None, of_keys]
    if causal:
        mask_BTS &= of_queries[:, None] >= of_keys
    return {"mask": mask_BTS[:, None]}
