"""Cross-entropy of logits that are divided over the tensor-parallel ranks by words.

With each rank's part of the logits, l over V/2 words, it needs two all-reduces of one number per token:

    m = max over ranks of max l [1]     Z = sum over ranks of Σ exp(l - m), t = l[label] of the rank that has it [2]
    loss = log Z + m - t [3]            gradient of the own part: exp(l - m)/Z - onehot, without communication [4]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.autograd_function import differentiable_once
from shoal.comm.collectives import all_reduce
from shoal.parallel.tensor import TensorParallel


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, tensor: TensorParallel, *, ignore: int) -> Tensor:
    """Return the cross-entropy, summed over labels that count, from this rank's part of the logits."""
    loss: Tensor = _VocabularyCrossEntropy.apply(logits, labels, tensor, ignore)  # type: ignore[no-untyped-call]
    return loss


class _VocabularyCrossEntropy(torch.autograd.Function):
    """The steps [1] to [4] of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tensor: TensorParallel, ignore: int) -> Tensor:
        counts = labels != ignore
        local = labels - tensor.first_of(tensor.num_logits)
        is_here = (local >= 0) & (local < logits.shape[-1]) & counts
        is_label = (labels >= 0) & (labels < tensor.num_logits)  # any other label raises, as on one device
        index = local.masked_fill((is_label & ~is_here) | ~counts, 0)[:, None]
        largest = all_reduce(logits.amax(-1), tensor.group, dist.ReduceOp.MAX)  # [1] no rank's exp may overflow
        exponentials = (logits - largest[:, None]).exp_()
        target = logits.gather(-1, index)[:, 0].masked_fill(~is_here, 0.0)  # one rank has it, the others add 0
        total, target = all_reduce(torch.stack([exponentials.sum(-1), target]), tensor.group)  # [2]
        ctx.save_for_backward(exponentials.div_(total[:, None]), index, is_here, counts)
        loss: Tensor = ((total.log() + largest - target) * counts).sum()  # [3]
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        softmax, index, is_here, counts = ctx.saved_tensors
        grad = softmax * counts[:, None]  # [4]
        grad.scatter_add_(-1, index, -is_here[:, None].to(grad.dtype))
        return grad.mul_(grads[0]), None, None, None
