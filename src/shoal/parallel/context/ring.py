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
from shoal.numerics.ops.attention import PLAIN, AttentionOutput, AttentionRule, attend, attend_backward, blind_, merge_
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
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ring: Ring,
    *,
    causal: bool,
    rule: AttentionRule = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the keys of all ranks. `mask` (B, full sequence): of integers, the document of each token, and a query
    sees keys of its own only; of booleans, whether a key may be seen. `sinks` (N,): the score of a key without a value,
    which every query of a head sees."""
    sight = Sight(ring, causal, rule)
    out: Tensor = _RingAttention.apply(q, k, v, sinks, mask, sight)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, sight: Sight
    ) -> Tensor:
        keys_values, ring, rule = torch.stack([k, v]), sight.ring, sight.rule
        total: AttentionOutput | None = None
        for step, block in around(keys_values, ring, sight.causal):
            some_k, some_v = _some(block, step.keys, 3)
            part = attend(_some(q, step.queries, 2), some_k, some_v, **sight.of(step, q, mask), rule=rule)
            if total is None:
                total = AttentionOutput(part.out.to(wide(q.dtype)), part.lse)
            else:
                merge_(AttentionOutput(*(_some(x, step.queries, 2) for x in total)), part)
            del part  # free it before the next one is computed
        assert total is not None
        if sinks is not None:
            merge_(
                total,
                AttentionOutput(torch.zeros_like(total.out), sinks[:, None].to(total.lse.dtype).expand_as(total.lse)),
            )
        if mask is not None:
            blind_(total, q.dtype)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, out, total.lse, sinks, mask)
        ctx.sight = sight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        q, keys_values, out, lse, sinks, mask = ctx.saved_tensors
        sight, dtype = ctx.sight, wide(q.dtype)
        ring, rule = sight.ring, sight.rule
        d_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        d_own = torch.zeros(keys_values.shape, dtype=dtype, device=q.device)
        coming: Exchange | None = None
        for step, block in around(keys_values, ring, sight.causal):  # [1]
            grad, some_q, some_out, some_lse = (_some(x, step.queries, 2) for x in (grads[0], q, out, lse))
            some_k, some_v = _some(block, step.keys, 3)
            # The output and lse of all keys are final: so each block's gradient needs no other block.
            attended, seen = AttentionOutput(some_out, some_lse), sight.of(step, q, mask)
            dq, *d_kv = attend_backward(grad, some_q, some_k, some_v, attended, **seen, rule=rule)
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
        d_sinks = None if sinks is None else _gradient_of_sinks(sinks, grads[0], out, lse)
        return d_q.to(q.dtype), d_k, d_v, d_sinks, None, None


def _gradient_of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """dS = P (dP - Σ dO·O), where the value, and so dP, is 0."""
    weights = (sinks[:, None].to(lse.dtype) - lse).exp_()
    inner = (grad.to(lse.dtype) * out).sum(-1)
    return -(weights * inner).sum((0, 2)).to(sinks.dtype)


def _some(x: Tensor, which: str, dim: int) -> Tensor:
    """Return all tokens, or those of the early or the late chunk; a view."""
    half = x.shape[dim] // 2
    return x if which == "all" else x.narrow(dim, half if which == "late" else 0, half)


@dataclass(frozen=True)
class Sight:
    """Which keys the queries of a step may see."""

    ring: Ring
    causal: bool
    rule: AttentionRule

    def of(self, step: RingStep, q: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Return a flag, which is enough without documents, padding and windows, or a mask."""
        window = self.rule.window
        if mask is None and window is None:
            return {"is_causal": step.is_causal}
        num_tokens = q.shape[2] * self.ring.degree
        of_queries = _some(self.ring.indices(num_tokens, self.ring.index, q.device), step.queries, 0)
        of_keys = _some(self.ring.indices(num_tokens, step.source, q.device), step.keys, 0)
        before = of_queries[:, None] - of_keys
        mask_BTS = (before >= 0 if self.causal else torch.ones_like(before, dtype=torch.bool))[None]
        if window is not None:
            mask_BTS = mask_BTS & (before.abs() < window)
        if mask is not None and mask.dtype == torch.bool:
            mask_BTS = mask_BTS & mask[:, None, of_keys]
        elif mask is not None:
            mask_BTS = mask_BTS & (mask[:, of_queries, None] == mask[:, None, of_keys])
        return {"mask": mask_BTS[:, None]}
