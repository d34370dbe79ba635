"""Find the count of a mean loss without an autograd graph, in an evaluation.

While a loss function runs, calls of torch's reductions are recorded with their divisors. See `counting`, which reads
the same from a graph.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LABELLED = {F.cross_entropy, F.nll_loss}
_BY_ELEMENT = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}
_MODEL = {F.linear, F.embedding, F.conv1d, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul, Tensor.__matmul__}
"""Operations of a model, where the search for reductions ends."""
_SWAPPED, _PERMUTED = {torch.transpose, Tensor.transpose}, {torch.permute, Tensor.permute}
_MEANS, _SUMS = {torch.mean, Tensor.mean}, {torch.sum, Tensor.sum}
_SAME = {Tensor.to, Tensor.float, Tensor.double, Tensor.clone, Tensor.contiguous, torch.neg, Tensor.neg, Tensor.detach}
_SCALED = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_DIVIDED = {torch.div, Tensor.div, Tensor.__truediv__}
_ADDED = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__}


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a function of torch."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True, slots=True)
class Noted:
    """A scalar from a reduction. Without a count, it is a sum."""

    result: Tensor
    """Kept alive, since another tensor could get its id."""
    count: Tensor | float | None
    is_first: bool = True
    """Whether nothing of it was reduced before."""


class CallRecorder(TorchFunctionMode):
    """Record the results of reductions inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[int, Noted] = {}
        self.reduced: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        """Tensors computed from a reduction over samples, and whether only from sums."""
        self.moved: dict[int, weakref.ref[Tensor]] = {}
        """Tensors computed from one whose first dimension was moved."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = _Call(func, args, kwargs or {}, func(*args, **(kwargs or {})))
        result = call.result
        if isinstance(result, Tensor) and result.is_floating_point():
            below = self._below(call)
            self._note_reduced(call, below)
            if not result.dim() and (noted := self._note(call, below)) is not None:
                self.noted[id(result)] = noted
        return result

    def of(self, value: Any) -> Noted | None:
        """The record of this tensor."""
        return self.noted.get(id(value))

    def _below(self, call: _Call) -> bool | None:
        """Whether an argument was reduced over samples before, only by sums; None: it was not."""
        if call.func in _MODEL:
            return None
        values = [*call.args, *call.kwargs.values()]
        flat = [one for value in values for one in (value if isinstance(value, tuple | list) else [value])]
        found = [(one, *self.reduced[id(one)]) for one in flat if id(one) in self.reduced]
        are_sums = [is_sum for one, there, is_sum in found if there() is one]
        return all(are_sums) if are_sums else None

    def _note_reduced(self, call: _Call, below: bool | None) -> None:
        func, args, kwargs, result = call.func, call.args, call.kwargs, call.result
        is_sum = below
        is_moved = func not in _MODEL and any(id(x) in self.moved and self.moved[id(x)]() is x for x in args)
        if is_moved or _moves_samples(func, args):
            self.moved[id(result)] = weakref.ref(result)
        if func in _MEANS or func in _SUMS or func in _BY_ELEMENT or func in _LABELLED:
            if is_moved or _is_over_samples(call):
                is_sum = not is_moved and (func in _SUMS or kwargs.get("reduction") == "sum") and below is not False
        elif func not in _MODEL and not result.dim() and any(isinstance(x, Tensor) and x.dim() for x in args):
            is_sum = False
        if is_sum is not None:
            self.reduced[id(result)] = weakref.ref(result), is_sum

    def _note(self, call: _Call, below: bool | None) -> Noted | None:
        func, args, result = call.func, call.args, call.result
        if func in _LABELLED or func in _BY_ELEMENT:
            return _of_criterion(call) if below is None else None
        is_reduction = func in _MEANS or func in _SUMS
        if (is_reduction or func in _DIVIDED) and (not args or (func in _DIVIDED and len(args) < 2)):
            return None  # by keyword
        if is_reduction and below is not None and args[0].numel() == 1:
            before = self.of(args[0])
            return None if before is None else Noted(result, before.count)
        if func in _MEANS:
            return Noted(result, float(args[0].numel())) if below is None else None
        if func in _SUMS:
            return None if below is False else Noted(result, None, is_first=below is None)
        inputs = [noted for value in args if (noted := self.of(value)) is not None]
        if func in _ADDED:
            if len(inputs) == 1 and any(isinstance(value, int | float) for value in args):
                return Noted(result, inputs[0].count)
            are_sums = len(inputs) == 2 and all(noted.count is None for noted in inputs)
            return Noted(result, None) if are_sums else None
        if len(inputs) != 1:
            return None
        is_by_number = any(isinstance(value, int | float) for value in args)
        if func in _SAME or (func in _SCALED and inputs[0].count is not None and is_by_number):
            return Noted(result, inputs[0].count)
        if func not in _DIVIDED or inputs[0].result is not args[0]:
            return None
        if inputs[0].count is not None:
            return Noted(result, inputs[0].count) if is_by_number else None
        return Noted(result, args[1]) if inputs[0].is_first else None


class Unrecorded:
    """A model whose calls are not recorded, since a compiler has captured parts of it."""

    def __init__(self, model: Any, recorder: CallRecorder) -> None:
        self._model, self._recorder = model, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stop recording, call the model, and record again."""
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return self._model(*args, **kwargs)
        finally:
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return Unrecorded(found, self._recorder) if callable(found) else found


def _moves_samples(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the first dimension is moved."""
    if func in _SWAPPED:
        return bool({0, -args[0].dim()} & set(args[1:])) if args else True
    if func in _PERMUTED:
        dims = args[1] if len(args) > 1 and isinstance(args[1], tuple | list) else args[1:]
        return not dims or dims[0] not in (0, -len(dims))
    return func in (torch.t, Tensor.t, Tensor.T.__get__)  # type: ignore[attr-defined]


def _is_over_samples(call: _Call) -> bool:
    """Whether a reduction is over all dimensions, or over the first."""
    args = call.args
    if call.func in _BY_ELEMENT or call.func in _LABELLED:
        return not call.result.dim()
    dims = call.kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not call.result.dim() or dims is None or not args or dims == ():
        return True
    return any(dim in (0, -args[0].dim()) for dim in ([dims] if isinstance(dims, int) else dims))


def _of_criterion(call: _Call) -> Noted | None:
    bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    arguments, result = bound.arguments, call.result
    if arguments["reduction"] != "mean":
        return Noted(result, None) if arguments["reduction"] == "sum" else None
    target, values = arguments["target"], arguments["input"]
    if call.func in _BY_ELEMENT:
        return Noted(result, float(torch.broadcast_shapes(values.shape, target.shape).numel()))
    if target.is_floating_point():
        return Noted(result, float(values.numel() / values.shape[1 if values.dim() > 1 else 0]))
    counts = target != arguments["ignore_index"]
    weight = arguments["weight"]
    return Noted(result, counts.sum() if weight is None else weight[target[counts]].sum())
