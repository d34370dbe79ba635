"""Keep float64 where a model casts to float32.

Models of transformers compute norms, rotary embeddings, softmax and losses in float32, whatever their weights are in.
In a verification in float64 that rounds to 1e-7, which hides errors of that size. Inside of `keeping_float64`, a cast
of float64 or of whole numbers to float32 gives float64.

A `TorchFunctionMode` would do, but it is off inside of a backward, where blocks may be recomputed. So methods of
Tensor, and functions of torch, are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shoal.blueprint.plan import Precision

METHODS = ("to", "type", "softmax", "log_softmax", "sum", "mean", "cumsum")
"""Methods that take a dtype."""
FUNCTIONS = ("softmax", "log_softmax", "sum", "mean", "cumsum")
"""The same as functions of torch."""


def keeping_float64(precision: Precision, *, is_foreign: bool) -> AbstractContextManager[Any]:
    """Keep float64 inside, in a verification in float64 of a model of another package."""
    return _replaced_methods() if precision == "fp64" and is_foreign else nullcontext()


@contextmanager
def _replaced_methods() -> Iterator[None]:
    before = {name: getattr(Tensor, name) for name in ("float", *METHODS)}
    functions = {name: getattr(torch, name) for name in FUNCTIONS}
    convert = before["to"]

    def to_float(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return convert(tensor, _wide(tensor, torch.float32), *arguments, **options)  # type: ignore[no-any-return]

    try:
        for name in METHODS:
            setattr(Tensor, name, _widened(before[name]))
        for name, function in functions.items():
            setattr(torch, name, _widened(function))
        Tensor.float = to_float  # type: ignore[method-assign, assignment]
        yield
    finally:
        for name, method in before.items():
            setattr(Tensor, name, method)
        for name, function in functions.items():
            setattr(torch, name, function)


def _widened(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        tensor = arguments[0] if arguments else options.get("input")
        if not isinstance(tensor, Tensor):
            return method(*arguments, **options)
        given = (_wide(tensor, one) for one in arguments)
        return method(*given, **{name: _wide(tensor, value) for name, value in options.items()})

    return call


def _wide(tensor: Tensor, value: Any) -> Any:
    """The dtype that a tensor is cast to; a trace of shapes, on the meta device, is in float32."""
    is_exact = tensor.dtype in (torch.float64, torch.int64) and not tensor.is_meta
    return torch.float64 if value is torch.float32 and is_exact else value
