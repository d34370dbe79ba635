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
from shoal.parallel.head import LossHead
from shoal.parallel.tensor import TensorParallel, vocabulary_cross_entropy

LossFunction = Callable[[nn.Module, Any], Tensor]


class Objective(Protocol):
    """A sum over a microbatch, and how many things it is a sum over."""

    def weight(self, batch: Any) -> int:
        """How many things of this batch count. Reads the data only."""

    def loss_sum(self, model: nn.Module, batch: Any, weight: float) -> Tensor:
        """The loss, summed over them. `weight` is their number, or 0 where a batch only stands in for none."""


class CrossEntropy:
    """Of the model's logits and the batch's `labels`; labels of -100 do not count.

    A batch is a mapping whose other entries are the model's arguments by name, or a pair `(inputs, labels)`.
    """

    def __init__(self, tensor: TensorParallel | None = None, head: LossHead | None = None) -> None:
        self.tensor = tensor or TensorParallel()
        """Who else has a part of the logits: with tensor parallelism, no rank ever holds them all."""
        self.head = head
        """The layer of the model that can compute the loss itself; None: the model returns logits."""

    def weight(self, batch: Any) -> int:
        """The number of labels that count."""
        return weight_of(batch)

    def loss_sum(self, model: nn.Module, batch: Any, weight: float) -> Tensor:
        """Cross-entropy in at least float32, summed over the labels that count."""
        if self.head is not None:
            with self.head.takes(_labels(batch)):
                total: Tensor = _output(model, batch)
            if not self.head.has_returned(total):
                raise ShoalError(
                    "describe() names a head, and the forward returns something else than what that head returned",
                    fix="leave head= out of the description",
                )
            return total if weight else total * 0.0
        with self.tensor.split_logits():
            logits, labels = _logits_and_labels(model, batch)
        wide = (logits if logits.dtype.itemsize >= 4 else logits.float()).flatten(0, -2)
        if self.tensor.num_logits:
            total = vocabulary_cross_entropy(wide, labels.flatten().long(), self.tensor, ignore=IGNORE)
        else:
            total = F.cross_entropy(wide, labels.flatten().long(), ignore_index=IGNORE, reduction="sum")
        return total if weight else total * 0.0


class MeanOf:
    """A user's function that returns the mean over a microbatch, as loss functions do by default."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def weight(self, batch: Any) -> int:
        """Valid labels if the batch has `labels`, else samples."""
        return weight_of(batch)

    def loss_sum(self, model: nn.Module, batch: Any, weight: float) -> Tensor:
        """The mean times what it is a mean over."""
        return sum_from_mean(self.function(model, batch), weight)


def objective_of(loss: LossFunction | Objective | None) -> Objective:
    """What `Run(loss=...)` means."""
    if loss is None:
        return CrossEntropy()
    if isinstance(loss, str):
        raise ShoalError(f"loss is {loss!r}", fix="loss=lambda model, batch: ...; or fused_loss=True, False or None")
    if not callable(loss):
        return loss
    if isinstance(loss, nn.Module) or (getattr(loss, "__module__", None) or "").startswith("torch."):
        name = type(loss).__name__ if isinstance(loss, nn.Module) else loss.__name__
        raise ShoalError(
            f"{name} compares predictions with labels, but a loss is called as loss(model, batch)",
            fix=f"loss=lambda model, batch: {name}(model(batch[0]), batch[1]), or whatever your batches look like",
        )
    return MeanOf(loss)


def sum_from_mean(mean: Tensor, weight: float) -> Tensor:
    """The sum whose mean over `weight` things this is. The mean over nothing is NaN, and counts for nothing."""
    if not isinstance(mean, Tensor) or mean.dim():
        fix = (
            "loss.mean()" if isinstance(mean, Tensor) else "the tensor that the model's output was made to, not .item()"
        )
        raise ShoalError(f"a loss is a tensor of one number, the mean over a batch, not {_kind(mean)}", fix=fix)
    return mean * weight if weight else mean.nan_to_num(0.0) * 0.0


class _Called(Exception):
    """Carries the arguments with which a loss function called the model."""


class _Recorder(nn.Module):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        raise _Called(arguments, options)


class _Answer(nn.Module):
    """Stands for a model whose output is known already."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.outputs = [output]

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if not self.outputs:
            raise ShoalError(
                "the loss calls the model twice, and in a pipeline a microbatch goes through the model once",
                fix="one call of the model in the loss, or pp=1",
            )
        return self.outputs.pop()


def call_of(objective: Objective, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With what the objective calls the model, for a batch."""
    try:
        objective.loss_sum(_Recorder(), batch, 0.0)
    except _Called as called:
        arguments, options = called.args
        return arguments, options
    raise ShoalError("the loss does not call the model", fix="loss=lambda model, batch: ... model(...) ...")


def loss_of_output(objective: Objective, output: Any, batch: Any, weight: float) -> Tensor:
    """The objective's sum for what the model has returned."""
    return objective.loss_sum(_Answer(output), batch, weight)


def _labels(batch: Any) -> Tensor:
    if isinstance(batch, Mapping) and "labels" in batch:
        labels = batch["labels"]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    else:
        raise _no_labels(batch)
    return labels  # type: ignore[no-any-return]


def _output(model: nn.Module, batch: Any) -> Any:
    """What the model returns for all of a batch but its labels."""
    if isinstance(batch, Mapping):
        output = model(**{name: value for name, value in batch.items() if name != "labels"})
    else:
        output = model(batch[0])
    return getattr(output, "logits", output)


def _logits_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    labels = _labels(batch)
    logits = _output(model, batch)
    if not isinstance(logits, Tensor) or labels.is_floating_point():
        raise ShoalError(
            f"cross-entropy, the loss of a run unless another is given, takes logits and whole numbers as labels, not"
            f" {_kind(logits)} and {_kind(labels)}",
            fix="Run(loss=lambda model, batch: ...), the mean over a batch",
        )
    if not logits.dim() or logits[..., 0].numel() != labels.numel():
        raise ShoalError(
            f"cross-entropy takes a label for each row of logits, not logits of shape {tuple(logits.shape)} and labels"
            f" of shape {tuple(labels.shape)}",
            fix="labels of the shape of the logits but for their last dim; or Run(loss=lambda model, batch: ...)",
        )
    return logits, labels


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    shape = f" and shape {tuple(value.shape)}" if value.dim() else ""
    return f"a tensor of {value.dtype}{shape}"


def _no_labels(batch: Any) -> ShoalError:
    return ShoalError(
        f"this batch (a {type(batch).__name__} of {length(batch)} samples) has no labels that cross-entropy could use",
        fix="give batches as {..., 'labels': ...} or (inputs, labels), or say Run(loss=lambda model, batch: ...)",
    )
