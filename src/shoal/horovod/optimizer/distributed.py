"""Make a distributed optimizer of the class of a given one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.horovod.optimizer.adasum import AdasumMixin
from shoal.horovod.optimizer.gradients import DistributedMixin, ReduceOptions
from shoal.horovod.reduce_ops import Adasum


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *positional: Any,
    **options: Any,
) -> Any:
    """Return an optimizer whose `step` uses the gradients of all ranks.

    `isinstance(result, type(optimizer))` holds. Further arguments, with Horovod's names and order: compression,
    backward_passes_per_step, op, gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set.
    """
    checked = ReduceOptions(*positional, **options)
    if checked.num_groups:
        warnings.warn("`num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
    mixin: Any = AdasumMixin if checked.op == Adasum else DistributedMixin
    kind = type(optimizer)
    result: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__doc__": kind.__doc__}))
    # State, options and hooks of the given optimizer are kept: it may have been loaded from a checkpoint. A scheduler
    # has replaced `step` on the object; that one would bypass ours.
    result.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")})
    result._set_up(named_parameters, checked)
    return result
