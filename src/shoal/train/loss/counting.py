"""Over how many things a loss is a mean, read from the way in which it was computed.

Means of microbatches are put together by their counts. A loss function may return the sum and the count. Where it
returns a mean, the autograd graph shows what it was divided by: torch's cross-entropy saves the number of labels that
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
from shoal.train.loss.autograd_graph import common_count, leaves_of
from shoal.train.loss.call_recorder import Watch


class Kind(IntEnum):
    """What a loss function has returned."""

    MEAN = 1  # over an unknown number of things
    SUM = 2  # over an unknown number of things
    COUNTED = 3  # a mean, and the graph shows its count
    PAIR = 4  # a sum and a count


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as it was returned: a mean or a sum, and over how many things if that is known."""

    value: Tensor
    kind: Kind
    count: Tensor | float | None = None
    is_shifted: bool | None = None
    """Whether the model was seen to shift its labels; None: that was not looked at, or could not be seen."""

    @property
    def total(self) -> Tensor:
        """The sum, where the count is known. The mean over nothing is NaN, and counts for nothing."""
        if self.kind is Kind.PAIR:
            return self.value
        value = self.value.to(wide(self.value.dtype))  # a count may be too large for 16 bits
        count = self.count_as(value.dtype)
        return torch.where(count > 0, value, value.nan_to_num(0.0) * 0.0) * count

    def count_as(self, dtype: torch.dtype) -> Tensor:
        """The count, beside the loss. (A GPU would wait for `torch.as_tensor` of a number.)"""
        assert self.count is not None
        if isinstance(self.count, Tensor):
            return self.count.to(self.value.device, dtype)
        return torch.full((), self.count, dtype=dtype, device=self.value.device)


def read_loss(returned: Any, watch: Watch | None = None) -> Loss:
    """Understand what a loss function returned: a mean, or (sum, count). Without a graph, `watch` saw its count."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return _pair(*returned)
    if not isinstance(returned, Tensor) or returned.dim():
        fix = (
            "loss.mean(), or (sum, count)"
            if isinstance(returned, Tensor)
            else "the tensor that the model's output was made to, not .item()"
        )
        raise ShoalError(f"a loss is a tensor of one number, the mean over a batch, not {kind_of(returned)}", fix=fix)
    if watch is not None and (noted := watch.of(returned)) is not None:
        return Loss(returned, Kind.SUM if noted.count is None else Kind.COUNTED, noted.count)
    leaves = list(leaves_of(returned.grad_fn))
    if leaves and all(leaf.is_sum for leaf in leaves):
        return Loss(returned, Kind.SUM)
    count = common_count(leaves)
    return Loss(returned, Kind.MEAN if count is None else Kind.COUNTED, count)


def _pair(total: Any, count: Any) -> Loss:
    is_sum = isinstance(total, Tensor) and not total.dim()
    is_count = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if not is_sum or not is_count:
        raise ShoalError(
            f"a loss of two parts is a sum, a tensor of one number, and a count, not {kind_of(total)} and"
            f" {kind_of(count)}",
            fix="return loss.sum(), (labels != -100).sum()",
        )
    return Loss(total, Kind.PAIR, count.detach().reshape(()) if isinstance(count, Tensor) else float(count))


def kind_of(value: Any) -> str:
    """A value in a few words."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    shape = f" and shape {tuple(value.shape)}" if value.dim() else ""
    return f"a tensor of {value.dtype}{shape}"


# ---- what the data says ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether a mean over a batch can be a mean over anything but equally many things of each sample."""

    is_ragged: bool
    """Some samples have labels or other elements that do not count."""
    per_sample: float
    """Elements of one sample."""

    @property
    def numbers(self) -> list[float]:
        """Three numbers whose sums over all ranks tell whether these are alike: see `are_alike`."""
        return [float(self.is_ragged), self.per_sample, self.per_sample**2]


def evidence_of(batch: Any) -> Evidence:
    """Look at a batch: labels that are ignored, masks, and the shape of a sample."""
    num_elements = 0
    is_ragged = any(_is_ragged(name, tensor) for name, tensor in _named(batch))

    def note(tensor: Tensor) -> Tensor:
        nonlocal num_elements
        num_elements += tensor.numel()
        return tensor

    map_tensors(note, batch)
    return Evidence(is_ragged, num_elements / length(batch))


def are_alike(num_ragged: float, total: float, squares: float, number: float) -> bool:
    """Whether no batch was ragged, and all of them have samples of one shape, from sums over `number` of them."""
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
    """A mask that leaves something out, or whole numbers of which one is not a label."""
    if tensor.dtype == torch.bool or "mask" in name.lower():
        return bool(tensor.numel()) and not bool((tensor == tensor.flatten()[0]).all())
    return not tensor.is_floating_point() and not tensor.is_complex() and bool((tensor == IGNORE).any())
