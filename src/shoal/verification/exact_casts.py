"""Keep float64 where a model casts to float32.

Models of transformers compute norms, rotary embeddings, softmax and losses in float32, whatever their weights are in.
In a verification in float64 that rounds to 1e-7, which hides errors of that size. Inside of `keeping_float64`, a cast
of float64 or of whole numbers to float32 gives float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.blueprint.plan import Precision

NARROW = torch.float32


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
        is_exact = isinstance(given, Tensor) and given.dtype in (torch.float64, torch.int64)
        if isinstance(given, Tensor) and is_exact and not given.is_meta:  # a trace of shapes is in float32
            if func is Tensor.float:
                return given.double()
            if kwargs.get("dtype") is NARROW:
                kwargs = {**kwargs, "dtype": torch.float64}
            if func in (Tensor.to, Tensor.type) and any(one is NARROW for one in args[1:]):
                args = tuple(torch.float64 if one is NARROW else one for one in args)
        return func(*args, **kwargs)


def keeping_float64(precision: Precision, *, is_foreign: bool) -> AbstractContextManager[Any]:
    """Keep float64 inside, in a verification in float64 of a model of another package."""
    return _KeepFloat64() if precision == "fp64" and is_foreign else nullcontext()
