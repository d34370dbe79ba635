"""Find the count of a mean loss from how it was computed.

Means of microbatches are combined by their counts. A loss function may return the sum and the count. If it returns a
mean, the autograd graph shows the divisor: torch's cross-entropy saves the number of labels that
were not ignored (or the sum of their class weights), `x.mean()` its number of elements, `a.sum() / n` the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch import IGNORE, length, map_tensors
from shoal.errors import ShoalError
from shoal.numerics.precision import wide
from shoal.train.loss.autograd_graph import common_count, labels_of, leaves_of, root_of
from shoal.train.loss.call_recorder import CallRecorder


class Kind(IntEnum):
    """The kind of value that a loss function has returned."""

    MEAN = 1  # over an unknown number of items
    SUM = 2  # over an unknown number of items
    COUNTED = 3  # a mean, and the graph shows its count
    PAIR = 4  # a sum and a count


@dataclass(frozen=True, slots=True)
class Loss:
    """A returned loss: a mean or a sum, with its count if that is known."""

    value: Tensor
    kind: Kind
    count: Tensor | float | None = None
    is_shifted: bool | None = None
    """Whether the model shifts its labels; None: not checked, or not visible."""
    is_nonlinear: bool = False
    """Whether it is another function of the batch than a mean, so that parts of a batch cannot be put together."""
    divisor: float | None = None
    """The Python number by which a mean is divided."""
    labels: tuple[Tensor, int] | None = None
    """How many labels a sum counts that is divided by `count`, and how many there are; None: not visible."""

    @property
    def total(self) -> Tensor:
        """The sum, if the count is known. The mean over no item is NaN, and its sum is 0."""
        if self.kind is Kind.PAIR:
            return self.value
        value = self.value.to(wide(self.value.dtype))  # a count may be too large for 16 bits
        count = self.count_as(value.dtype)
        return torch.where(count > 0, value, value.nan_to_num(0.0) * 0.0) * count

    def count_as(self, dtype: torch.dtype) -> Tensor:
        """The count, on the device of the loss. (`torch.as_tensor` of a number would block on a GPU.)"""
        assert self.count is not None
        if isinstance(self.count, Tensor):
            return self.count.to(self.value.device, dtype)
        return torch.full((), self.count, dtype=dtype, device=self.value.device)


def read_loss(returned: Any, recorder: CallRecorder | None = None) -> Loss:
    """Interpret the value of a loss function: a mean, or (sum, count). Without a graph, `recorder` has its count."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return _pair(*returned)
    if not isinstance(returned, Tensor) or returned.dim():
        fix = (
            "loss.mean(), or (sum, count)"
            if isinstance(returned, Tensor)
            else "the tensor that the model's output was made to, not .item()"
        )
        raise ShoalError(
            f"a loss is a tensor of one number, the mean over a batch, not {kind_of(returned)}", fix=fix, code="T012"
        )
    if recorder is not None and (noted := recorder.of(returned)) is not None:
        return Loss(returned, Kind.SUM if noted.count is None else Kind.COUNTED, noted.count)
    leaves = list(leaves_of(root_of(returned)))
    if leaves and all(leaf.is_sum for leaf in leaves):
        return Loss(returned, Kind.SUM)
    count = common_count(leaves)
    is_nonlinear = any(leaf.is_nonlinear for leaf in leaves)
    labels = next((found for leaf in leaves if (found := labels_of(leaf)) is not None), None)
    divisors = {leaf.divisor for leaf in leaves}
    return Loss(
        returned,
        Kind.MEAN if count is None else Kind.COUNTED,
        count,
        is_nonlinear=is_nonlinear,
        divisor=divisors.pop() if len(divisors) == 1 else None,
        labels=labels,
    )


def _pair(total: Any, count: Any) -> Loss:
    is_sum = isinstance(total, Tensor) and not total.dim()
    is_count = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if not is_sum or not is_count:
        raise ShoalError(
            f"a loss of two parts is a sum, a tensor of one number, and a count, not {kind_of(total)} and"
            f" {kind_of(count)}",
            fix="return loss.sum(), (labels != -100).sum()",
            code="T012",
        )
    return Loss(total, Kind.PAIR, count.detach().reshape(()) if isinstance(count, Tensor) else float(count))


def kind_of(value: Any) -> str:
    """A short description of a value."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    shape = f" and shape {tuple(value.shape)}" if value.dim() else ""
    return f"a tensor of {value.dtype}{shape}"


# ---- the data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether every sample of a batch contributes equally many items to a mean."""

    is_ragged: bool
    """Whether some samples have ignored labels or masked elements."""
    per_sample: float
    """Elements of one sample."""

    @property
    def numbers(self) -> list[float]:
        """Three numbers whose sums over all ranks show whether these are equal: see `are_alike`."""
        return [float(self.is_ragged), self.per_sample, self.per_sample**2]


def evidence_of(batch: Any) -> Evidence:
    """Inspect a batch for ignored labels, masks, and the shape of a sample."""
    num_elements = 0
    is_ragged = any(_is_ragged(name, tensor) for name, tensor in _named(batch))

    def note(tensor: Tensor) -> Tensor:
        nonlocal num_elements
        num_elements += tensor.numel()
        return tensor

    map_tensors(note, batch)
    return Evidence(is_ragged, num_elements / length(batch))


def are_alike(num_ragged: float, total: float, squares: float, number: float) -> bool:
    """Whether no batch is ragged and all samples have one shape, from sums over `number` batches."""
    return not num_ragged and math.isclose(number * squares, total**2, rel_tol=1e-12)


def _named(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named(value, str(key))
    elif isinstance(batch, tuple | list):
        for place, value in enumerate(batch):
            yield from _named(value, getattr(batch, "_fields", [name] * len(batch))[place])


def _is_ragged(name: str, tensor: Tensor) -> bool:
    """Whether it is a mask with several values, or integers with an ignored label."""
    if tensor.dtype == torch.bool or "mask" in name.lower():
        return bool(tensor.numel()) and not bool((tensor == tensor.flatten()[0]).all())
    return not tensor.is_floating_point() and not tensor.is_complex() and bool((tensor == IGNORE).any())
