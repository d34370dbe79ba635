"""What the routers of a model share with the run that trains it: their auxiliary losses, and how busy experts were.

A loss that arises in the middle of a model, on any stage of a pipeline, cannot be added to the loss at its end. Here it
is hung on an activation instead: the activation's backward gives it its gradient. The same backward counts, so that a
block that is recomputed counts once.
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
    """What the routers of a model share with the run that trains it."""

    def __init__(self, group: Group = None) -> None:
        self.group = group
        """The ranks over which each sequence is divided, in equal parts. None: every rank has whole sequences."""
        self.factor: Callable[[], float] = _nothing
        """The gradient of one unit of auxiliary loss, summed over sequences; 0: a batch that counts for nothing. Asked
        for in the backward: in the forward the ranks may not have agreed on it yet."""
        self.loads: dict[str, Tensor] = {}
        """Router → how often each expert was chosen (E,), by tokens of this rank since the last `clear`."""
        self.dropped: dict[str, Tensor] = {}
        """Router → how many choices found no room (expert choice: tokens that no expert took), likewise."""
        self.auxiliary: dict[str, Tensor] = {}
        """Router → this rank's part of the auxiliary loss, summed over sequences, likewise."""

    def clear(self) -> None:
        """Forget what was summed up."""
        self.loads, self.dropped, self.auxiliary = {}, {}, {}

    def attach(self, y: Tensor, auxiliary: Tensor | None, load_E: Tensor, num_dropped: Tensor, name: str) -> Tensor:
        """y, whose backward also differentiates the auxiliary loss, and adds up the loads. Not the forward: a block
        that is recomputed runs its forward twice."""
        attached: Tensor = _Attach.apply(y, auxiliary, load_E, num_dropped, self, name)  # type: ignore[no-untyped-call]
        return attached

    def add(self, name: str, auxiliary: Tensor | None, load_E: Tensor, num_dropped: Tensor) -> None:
        """Sum up what one forward of one router has done."""
        for sums, value in ((self.loads, load_E), (self.dropped, num_dropped), (self.auxiliary, auxiliary)):
            if value is not None:
                value = value.detach()
                sums[name] = sums[name] + value if name in sums else value

    def as_now(self) -> AbstractContextManager[None]:
        """A context for later in which the factor is that of now: a recomputed block is of an earlier microbatch."""
        return self._with_factor(self.factor)

    @contextmanager
    def _with_factor(self, factor: Callable[[], float]) -> Iterator[None]:
        before, self.factor = self.factor, factor
        try:
            yield
        finally:
            self.factor = before

    def __deepcopy__(self, memo: dict[int, Any]) -> AuxLoss:
        """One for all parts of a model: groups are not copied."""
        return self


class _Attach(torch.autograd.Function):
    """Forward: y as it is. Backward: the auxiliary loss gets its gradient, as if it had been added to the loss."""

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
        factor = ctx.factor()  # of its own microbatch; in a pipeline, others have begun since
        if factor != 0:
            ctx.aux_loss.add(ctx.name, auxiliary, load_E, num_dropped)
        grad = torch.full_like(auxiliary, factor) if ctx.needs_input_grad[1] else None
        return grads[0], grad, None, None, None, None
