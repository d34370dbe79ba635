"""Ring attention: every rank keeps its queries, and the keys and values of all ranks pass by.

    rank 0   kv0 ──▶ kv2 ──▶ kv1            while a rank computes with one block of keys and values, it forwards that
    rank 1   kv1 ──▶ kv0 ──▶ kv2            block and receives the next: c - 1 messages, and no wait if a block takes
    rank 2   kv2 ──▶ kv1 ──▶ kv0            longer to compute than to send

`blueprint.context_parallel.ring_steps` lists what each rank computes in which step. With the zig-zag order every step
of every rank is the same amount of work.

The backward goes round once more [1]. The gradients of a block follow it, one step behind: a rank that has used the
block adds to its gradient [3] and forwards it [4], until it reaches the owner [5]. The owner's own share never leaves
it [2]. Gradients of block 0, c = 3:

    rank 1 (step 1) ──▶ rank 2 (step 2) ──▶ rank 0

torch has `context_parallel`, which replaces attention without a change of the model, needs its buffers listed by hand,
and runs on CUDA alone.
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
from shoal.numerics.ops.attention import AttentionOutput, attend, attend_backward, merge_
from shoal.numerics.precision import wide

KEYS_AND_VALUES, GRADIENTS = 0, 1
"""Tags: two messages from one rank to the next are in flight at a time."""


class Ring(Protocol):
    """The ranks among which keys and values rotate."""

    group: dist.ProcessGroup
    comm_device: torch.device
    """The device that tensors are sent from."""
    index: int
    degree: int

    def indices(self, num_tokens: int, index: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a rank's tokens in a full sequence."""


@dataclass
class Exchange:
    """A block in flight to the next rank, and another one from the previous rank."""

    works: list[dist.Work]
    sent: Tensor
    """Kept alive until it is sent."""
    received: Tensor
    device: torch.device

    @classmethod
    def start(cls, block: Tensor, ring: Ring, tag: int) -> Exchange:
        """Start to forward a block."""
        sent = block.to(ring.comm_device).contiguous()
        received = torch.empty_like(sent)
        after, before = (ring.index + 1) % ring.degree, (ring.index - 1) % ring.degree
        send = dist.P2POp(dist.isend, sent, group=ring.group, tag=tag, group_peer=after)
        receive = dist.P2POp(dist.irecv, received, group=ring.group, tag=tag, group_peer=before)
        return cls(dist.batch_isend_irecv([send, receive]), sent, received, block.device)

    def finish(self) -> Tensor:
        """Wait for the received block."""
        for work in self.works:
            work.wait()
        return self.received.to(self.device)


def around(block: Tensor, ring: Ring, causal: bool) -> Iterator[tuple[RingStep, Tensor]]:
    """Yield the blocks of all ranks, mine first; while one is used, the next is in flight."""
    for number, step in enumerate(ring_steps(ring.index, ring.degree, causal)):
        is_last = number == ring.degree - 1
        coming = None if is_last else Exchange.start(block, ring, KEYS_AND_VALUES)
        yield step, block
        if coming is not None:
            block = coming.finish()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between ranks are not part of a graph
def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring, *, causal: bool) -> Tensor:
    """Attend to the keys of all ranks. `documents` (B, full sequence): a query sees keys of its own document only."""
    out: Tensor = _RingAttention.apply(q, k, v, documents, ring, causal)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring, causal: bool
    ) -> Tensor:
        keys_values = torch.stack([k, v])
        total: AttentionOutput | None = None
        for step, block in around(keys_values, ring, causal):
            some_k, some_v = _some(block, step.keys, 3)
            part = attend(_some(q, step.queries, 2), some_k, some_v, **_sight(step, documents, ring, causal))
            if total is None:
                total = AttentionOutput(part.out.to(wide(q.dtype)), part.lse)
            else:
                merge_(AttentionOutput(*(_some(x, step.queries, 2) for x in total)), part)
            del part  # free it before the next one is computed
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
        for step, block in around(keys_values, ring, ctx.causal):  # [1]
            grad, some_q, some_out, some_lse = (_some(x, step.queries, 2) for x in (grads[0], q, out, lse))
            some_k, some_v = _some(block, step.keys, 3)
            # The output and lse of all keys are final: so each block's gradient needs no other block.
            attended, sight = AttentionOutput(some_out, some_lse), _sight(step, documents, ring, ctx.causal)
            dq, *d_kv = attend_backward(grad, some_q, some_k, some_v, attended, **sight)
            _some(d_q, step.queries, 2).add_(dq)
            del dq
            is_mine = step.source == ring.index
            # [2] Mine stays in d_own. Another's comes with the shares of the ranks between its owner and this one; the
            # first rank after the owner has nothing to wait for and starts from zeros.
            d_block = d_own if is_mine else torch.zeros_like(d_own) if coming is None else coming.finish()
            for gradient in _some(d_block, step.keys, 3):
                gradient.add_(d_kv.pop(0))  # [3]
            if not is_mine:
                coming = Exchange.start(d_block, ring, GRADIENTS)  # [4]
        del block, some_k, some_v
        if coming is not None:
            d_own.add_(coming.finish())  # [5]
        d_k, d_v = d_own.to(q.dtype)
        return d_q.to(q.dtype), d_k, d_v, None, None, None


def _some(x: Tensor, which: str, dim: int) -> Tensor:
    """Return all tokens, or those of the early or the late chunk; a view."""
    half = x.shape[dim] // 2
    return x if which == "all" else x.narrow(dim, half if which == "late" else 0, half)


def _sight(step: RingStep, documents: Tensor | None, ring: Ring, causal: bool) -> dict[str, Any]:
    """Return which keys the queries of a step may see: a flag is enough, unless samples are packed."""
    if documents is None:
        return {"is_causal": step.is_causal}
    num_tokens, device = documents.shape[1], documents.device
    of_queries = _some(ring.indices(num_tokens, ring.index, device), step.queries, 0)
    of_keys = _some(ring.indices(num_tokens, step.source, device), step.keys, 0)
    mask_BTS = documents[:, of_queries, None] == documents[:, None, of_keys]
    if causal:
        mask_BTS &= of_queries[:, None] >= of_keys
    return {"mask": mask_BTS[:, None]}
