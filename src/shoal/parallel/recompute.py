"""`recompute`: blocks that forget what they computed and compute it again in the backward.

torch gives `checkpoint` for one call of one function. Here it becomes a property of a block, by replacing its forward,
so that names stay and whatever wraps the block (compile, sharding) sees the block itself.

full        keeps a block's inputs only; costs one more forward
selective   keeps what is expensive to compute again, the results of matrix products and of attention, and recomputes
            the rest (norms, activations, rotations), which is cheap in time and large in memory
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.blueprint.plan import Recompute

_aten = torch.ops.aten
EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(block: nn.Module, how: Recompute) -> None:
    """Let the backward of a block recompute what its forward did not keep."""
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    block.forward = functools.partial(checkpoint, block.forward, **options)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
