"""What is minimised: a loss that is a *sum* over things that count (valid tokens, samples), and their number.

The law: the loss of a step is the sum over the global batch divided by the number of things that count in it, whatever
the layout or the microbatching. Means of ragged microbatches cannot be put together to that; sums and counts can. The
count comes from the data alone, so every rank knows the global one before the first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.batch import IGNORE, length, weight_of
from shoal.errors import ShoalError

LossFunction = Callable[[nn.Module, Any], Tensor]


class Objective(Protocol):
    """A sum over a microbatch, and how many things it is a sum over."""

    def weight(self, batch: Any) -> int:
        """How many things of this batch count. Reads the data only."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, summed over them."""


class CrossEntropy:
    """Of the model's logits and the batch's `labels`; labels of -100 do not count.

    A batch is a mapping whose other entries are the model's arguments by name, or a pair `(inputs, labels)`.
    """

    def weight(self, batch: Any) -> int:
        """The number of labels that count."""
        return weight_of(batch)

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy in at least float32, summed over the labels that count."""
        logits, labels = _logits_and_labels(model, batch)
        wide = logits if logits.dtype.itemsize >= 4 else logits.float()
        return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


class MeanOf:
    """A user's function that returns the mean over a microbatch, as loss functions do by default."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def weight(self, batch: Any) -> int:
        """Valid labels if the batch has `labels`, else samples."""
        return weight_of(batch)

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean times what it is a mean over."""
        return sum_from_mean(self.function(model, batch), self.weight(batch))


def sum_from_mean(mean: Tensor, weight: float) -> Tensor:
    """The sum whose mean over `weight` things this is. The mean over nothing is NaN, and counts for nothing."""
    return mean * weight if weight else mean.nan_to_num(0.0) * 0.0


def _logits_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping) and "labels" in batch:
        return model(**{name: value for name, value in batch.items() if name != "labels"}), batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
        return model(inputs), labels
    raise ShoalError(
        f"this batch (a {type(batch).__name__} of {length(batch)} samples) has no labels that cross-entropy could use",
        fix="give batches as {..., 'labels': ...} or (inputs, labels), or say Run(loss=lambda model, batch: ...)",
    )
