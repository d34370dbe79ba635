"""How tensors of several ranks become one."""

from __future__ import annotations

import warnings
from enum import IntEnum

from shoal.errors import ShoalError


class ReduceOp(IntEnum):
    """The reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that `op` or the older `average` names; Average by default."""
    if op is not None and average is not None:
        raise ShoalError(f"op and average are both set: op={op}, average={average}", fix="op=hvd.Average", code="H009")
    if average is not None:
        warnings.warn("`average` has been replaced by `op`: op=hvd.Average or op=hvd.Sum", DeprecationWarning, 3)
        return Average if average else Sum
    return Average if op is None else ReduceOp(op)
