"""`recompute`: blocks that do not save their activations and compute them again in the backward.

torch has `checkpoint` for one call of one function. Here it becomes a property of a block: its forward is replaced, so
that names stay and wrappers of the block (compile, sharding) see the block itself.

full        saves a block's inputs only; costs one more forward
selective   saves what is expensive to compute, the results of matrix products and of attention, and recomputes the
            rest (norms, activations, rotations), which is cheap in time and large in memory; ring attention is
            recomputed, since its parts together are larger than its result
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.blueprint.plan import Recompute
from shoal.comm.profile.timer import recomputing
from shoal.numerics.kernels import flash_attention_4 as _registers  # noqa: F401  # the operator
from shoal.numerics.ops.attention import is_part_of_attention
from shoal.numerics.ops.experts import fused as _registers_experts  # noqa: F401
from shoal.parallel.batch_norm import statistics_kept

_aten = torch.ops.aten
EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten.convolution.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._flash_attention_forward.default,
    torch.ops.shoal.flash_attention_4.default,
    torch.ops.shoal.experts.default,
}


def recompute(
    block: nn.Module, how: Recompute, as_now: Callable[[], Any] | None = None, *, is_compiled: bool = False
) -> None:
    """Make the backward of a block recompute what its forward did not save.

    `as_now` is called in the forward and returns a context for the recomputation: state of the run that a block reads
    may have changed since, in a pipeline by other microbatches. `is_compiled`: the result will be compiled, and a
    compiler applies a forward's side effects once.
    """
    if how == "none":
        return
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    if norms and not is_compiled:
        as_now = functools.partial(_with_statistics_kept, norms, as_now)
    options: dict[str, Any] = {"use_reentrant": False}
    selective = functools.partial(create_selective_checkpoint_contexts, _policy)
    if as_now is not None:
        options["context_fn"] = functools.partial(_as_then, as_now, selective if how == "selective" else _nothing)
    elif how == "selective":
        options["context_fn"] = selective
    forward = block.forward if is_compiled else _timed(block.forward)
    block.forward = functools.partial(checkpoint, forward, **options)


def _timed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward, whose second run a profile shows."""

    @functools.wraps(forward)
    def call(*arguments: Any, **options: Any) -> Any:
        with recomputing():
            return forward(*arguments, **options)

    return call


def _as_then(as_now: Callable[[], Any], contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    first, second = contexts()
    return first, _both(as_now(), second)


def _with_statistics_kept(norms: list[_NormBase], as_now: Callable[[], Any] | None) -> Any:
    """Update running statistics once per microbatch, not again when a block is recomputed."""
    return _both(nullcontext() if as_now is None else as_now(), statistics_kept(norms))


def _nothing() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


@contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    is_worth_it = operation in EXPENSIVE and not is_part_of_attention()
    return CheckpointPolicy.MUST_SAVE if is_worth_it else CheckpointPolicy.PREFER_RECOMPUTE
