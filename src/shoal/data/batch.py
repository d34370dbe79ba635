"""Cut and move batches: nested mappings, tuples and lists of tensors of the same length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError

IGNORE = -100  # a label that the loss ignores; torch's own default

_OF_TOKENS = ("tokens", "input_ids", "labels", "attention_mask", "token_type_ids", "position_ids")
"""Names under which models and losses read one tensor. Under others, a list of tensors may be what a model takes."""


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of a nested batch; other values stay as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def length(batch: Any) -> int:
    """The number of samples: the first dimension that all tensors share."""
    lengths: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            lengths.add(tensor.shape[0])
        return tensor

    _reject_lists(batch)
    map_tensors(note, batch)
    if len(lengths) != 1:
        found = f"tensors of lengths {sorted(lengths)}" if lengths else f"no tensor in a {type(batch).__name__}"
        raise ShoalError(
            f"all tensors of a batch must have the same first dimension, got {found}",
            fix="use the first dimension of every tensor for the samples"
            if lengths
            else "torch.tensor(values) for each list of numbers, samples first",
            code="D024",
        )
    return lengths.pop()


def _reject_lists(batch: Any) -> None:
    """Raise for a list in place of a tensor, as PyTorch's DataLoader makes it of rows that are lists: one tensor per
    position, each with a value of all samples. Labels may be a list for a loss of the script's own: of tensors, as for
    several heads, or of mappings, as of detectors."""
    if not isinstance(batch, Mapping):
        return
    for name in _OF_TOKENS:
        kinds = (int, float, list) if name == "labels" else (int, float, list, Tensor)
        if isinstance(found := batch.get(name), list) and found and isinstance(found[0], kinds):
            raise ShoalError(
                f"{name!r} of a batch must be one tensor, got a list of {len(found)} ({type(found[0]).__name__})",
                fix='dataset.with_format("torch") for a dataset of datasets; or torch.tensor(values) in the dataset'
                " or in collate_fn",
                code="D024",
            )


def rows(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop`, without a copy."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.ndim else tensor, batch)


def parts(batch: Any, size: int | None) -> list[Any]:
    """The batch in parts of `size` samples; the last one may be smaller. None: in one part."""
    if size is None:
        return [batch]
    count = length(batch)
    return [rows(batch, start, min(start + size, count)) for start in range(0, count, size)]


def to_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The batch on a device, floating-point tensors as `dtype`.

    Copies from pinned memory do not block the host, which is a step ahead of the device. So a GPU copies the next batch
    while it computes with this one, in a stream of its own.
    """

    def move(tensor: Tensor) -> Tensor:
        there = tensor.to(device, non_blocking=True)  # first: a tensor that is cast on the host is not pinned any more
        return there.to(dtype) if tensor.is_floating_point() else there

    if device.type != "cuda":
        return map_tensors(move, batch)
    computing, copying = torch.cuda.current_stream(device), stream_of_copies(device)

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            return move(tensor)
        with torch.cuda.stream(copying):
            copied = move(tensor)
        copied.record_stream(computing)
        return copied

    copied = map_tensors(copy, batch)
    computing.wait_stream(copying)
    return copied


@functools.cache
def stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    """The stream in which a device copies batches from the host."""
    return torch.cuda.Stream(device)


def weight_of(batch: Any) -> int:
    """The weight of a batch in a mean: its labels that are not `IGNORE` if it has labels, else its samples.

    >>> weight_of({"tokens": torch.zeros(2, 3), "labels": torch.tensor([[1, 2, -100], [4, -100, -100]])})
    3
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return int((labels != IGNORE).sum())
    return length(batch)
