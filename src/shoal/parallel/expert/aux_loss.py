"""Auxiliary losses and expert loads, which the routers of a model report to the run that trains it.

A loss that arises in the middle of a model, on any stage of a pipeline, cannot be added to the loss at its end. Here it
is attached to an activation instead, whose backward gives the loss its gradient. The same backward counts the loads, so
that a recomputed block counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.comm.autograd_function import differentiable_once
from shoal.comm.collectives import Group


def _nothing() -> float:
    return 0.0


class AuxLoss:
    """The state that the routers of a model share with the run that trains it."""

    def __init__(self, group: Group = None) -> None:
        self.group = group
        """The ranks over which each sequence is divided, in equal parts. None: every rank has full sequences."""
        self.factor: Callable[[], float] = _nothing
        """The gradient of one unit of auxiliary loss, summed over sequences; 0: a batch that does not count. It is
        called in the backward: in the forward the ranks may not have agreed on it yet."""
        self.loads: dict[str, Tensor] = {}
        """Router → how often each expert was chosen (E,), by tokens of this rank since the last `clear`."""
        self.dropped: dict[str, Tensor] = {}
        """Router → how many choices exceeded the capacity (expert choice: tokens that no expert took), likewise."""
        self.auxiliary: dict[str, Tensor] = {}
        """Router → this rank's part of the auxiliary loss, summed over sequences, likewise."""

    def clear(self) -> None:
        """Reset the sums."""
        self.loads, self.dropped, self.auxiliary = {}, {}, {}

    def attach(self, y: Tensor, auxiliary: Tensor | None, load_E: Tensor, num_dropped: Tensor, name: str) -> Tensor:
        """Return y, whose backward also differentiates the auxiliary loss and adds the loads. The forward does not: a
        recomputed block runs its forward twice."""
        attached: Tensor = _Attach.apply(y, auxiliary, load_E, num_dropped, self, name)  # type: ignore[no-untyped-call]
        return attached

    def add(self, name: str, auxiliary: Tensor | None, load_E: Tensor, num_dropped: Tensor) -> None:
        """Add the numbers of one forward of one router."""
        for sums, value in ((self.loads, load_E), (self.dropped, num_dropped), (self.auxiliary, auxiliary)):
            if value is not None:
                value = value.detach()
                sums[name] = sums[name] + value if name in sums else value

    def as_now(self) -> AbstractContextManager[None]:
        """Return a context that restores today's factor later: a recomputed block belongs to an earlier microbatch."""
        return self._with_factor(self.factor)

    @contextmanager
    def _with_factor(self, factor: Callable[[], float]) -> Iterator[None]:
        before, self.factor = self.factor, factor
        try:
            yield
        finally:
            self.factor = before

    def __deepcopy__(self, memo: dict[int, Any]) -> AuxLoss:
        """Return the same object: all parts of a model share it, and groups cannot be copied."""
        return self


class _Attach(torch.autograd.Function):
    """Forward: identity on y. Backward: the auxiliary loss gets its gradient, as if it had been added to the loss."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, auxiliary: Tensor | None, load_E: Tensor, dropped: Tensor, aux_loss: AuxLoss, name: str
    ) -> Tensor:
        ctx.save_for_backward(auxiliary, load_E, dropped)
        ctx.aux_loss, ctx.name, ctx.factor = aux_loss, name, aux_loss.factor
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        auxiliary, load_E, num_dropped = ctx.saved_tensors
        factor = ctx.factor()  # of its own microbatch; in a pipeline, others have started since
        if factor != 0:
            ctx.aux_loss.add(ctx.name, auxiliary, load_E, num_dropped)
        grad = torch.full_like(auxiliary, factor) if ctx.needs_input_grad[1] else None
        return grads[0], grad, None, None, None, None
