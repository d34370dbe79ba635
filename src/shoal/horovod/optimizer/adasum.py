"""`DistributedOptimizer(op=Adasum)`: each rank makes its own step, and the steps are combined by Adasum.

Adasum combines updates, not gradients: the optimizer's state (momentum) has to see the gradient of its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Problem
from shoal.horovod.basics import size
from shoal.horovod.collectives.allreduce import allreduce_async_
from shoal.horovod.collectives.waiting import synchronize
from shoal.horovod.optimizer.gradients import ReduceOptions
from shoal.horovod.optimizer.names import checked_names
from shoal.horovod.reduce_ops import Adasum


class AdasumMixin:
    """What a distributed optimizer with Adasum adds to the class of the user's optimizer."""

    param_groups: list[dict[str, Any]]

    def _set_up(self, named: Iterable[tuple[str, Tensor]] | None, options: ReduceOptions) -> None:
        self._options, self.process_set, self.op = options, options.process_set, options.op
        self._parameter_names = checked_names(self.param_groups, named)
        self.backward_passes_per_step = options.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes a step has; each `step` is one, however many there were."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: updates are combined in `step`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not possible: raises."""
        problem = Problem("H027", "skip_synchronize() cannot be used with op=Adasum", "optimizer.step() alone")
        raise AssertionError(str(problem))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make this rank's own step, and replace it by the Adasum of all ranks' steps."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        starts = {parameter: parameter.detach().clone() for parameter in parameters}
        for parameter in parameters:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
        loss = super().step(closure)  # type: ignore[misc]
        if size() == 1 or not self.process_set.included():
            return loss
        begun = []
        with torch.no_grad():
            for parameter in parameters:
                small, ctx = self._options.compression.compress(parameter - starts[parameter])
                name = f"adasum.{self._parameter_names[parameter]}"
                handle = allreduce_async_(small, None, name, Adasum, 1.0, 1.0, self.process_set)
                begun.append((parameter, handle, ctx))
            for parameter, handle, ctx in begun:
                parameter.copy_(starts[parameter] + self._options.compression.decompress(synchronize(handle), ctx))
        return loss
