"""The objective: a loss that is a *sum* over counted items (valid tokens, samples), and their number.

The rule: the loss of a step is the sum over the global batch divided by the number of counted items, for every layout
and microbatch size. Means of ragged microbatches cannot be combined to that; sums and counts can. The count of
cross-entropy comes from the data alone, so every rank knows the global count before the first backward. A loss
function shows its count only after a forward (`counting`); `deferred_count` then corrects the gradients once per step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.batch import IGNORE, length, weight_of
from shoal.errors import Problem, ShoalError
from shoal.numerics.precision import wide
from shoal.parallel.fused_loss_head import LossHead
from shoal.parallel.tensor import TensorParallel
from shoal.safe_parsing import short
from shoal.train.loss.call_recorder import CallRecorder, Unrecorded
from shoal.train.loss.counting import Kind, Loss, kind_of, read_loss
from shoal.train.loss.labels import (
    OWN_LOSS,
    holds_other,
    is_shifting,
    needs_labels,
    reject_changed,
    reject_copies,
    reject_other_logits,
    reject_shifted_twice,
    shifted,
    takes_labels,
)
from shoal.train.loss.vocabulary_loss import vocabulary_cross_entropy

LossFunction = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]


class Objective(Protocol):
    """A sum over a microbatch, and the number of items in it."""

    def weight(self, batch: Any) -> int:
        """The number of counted items of a batch. Reads the data only."""

    def loss_sum(self, model: nn.Module, batch: Any, weight: float) -> Tensor | Loss:
        """The loss, summed over the items. `weight` is their number, or 0 for a stand-in batch. A `Loss` has its own
        count, and `weight` was an estimate."""


@dataclass(slots=True)
class LabelRule:
    """The convention of a model for labels."""

    needs: bool = False
    """Whether it needs them as an argument, although its own loss is not used."""
    is_shifted: bool | None = False
    """Whether it compares logits with the next token's label; None: not known before its first batch."""
    hides_other: bool = False
    """Whether a module inside of it takes labels, and its own forward does not pass them on."""

    @classmethod
    def of(cls, model: nn.Module) -> LabelRule:
        """The rule of a model. If it takes labels, only its first batch shows whether it shifts them."""
        if not takes_labels(model):
            return cls(hides_other=holds_other(model))
        return cls(needs_labels(model), None)


class CrossEntropy:
    """Cross-entropy of the model's logits and the batch's `labels`; labels of -100 are ignored.

    A batch is a mapping whose other entries are the model's arguments by name, or a pair `(inputs, labels)`. A model
    that takes labels keeps its own convention: see `labels`.
    """

    def __init__(
        self, tensor: TensorParallel | None = None, head: LossHead | None = None, rule: LabelRule | None = None
    ) -> None:
        self.tensor = tensor or TensorParallel()
        """The tensor parallelism of the logits, of which each rank holds a part."""
        self.head = head
        """The layer of the model that can compute the loss itself; None: the model returns logits."""

        self.rule = rule or LabelRule()
        self.num_classes: int | None = None
        """The number of classes; None: not known before the first forward."""

    def weight(self, batch: Any) -> int:
        """The number of labels that are not ignored."""
        return weight_of(shifted_batch(batch) if self.rule.is_shifted else batch)

    def check(self, batch: Any) -> None:
        """Raise if a label of a batch is no class of the model. Labels on a GPU are not read, which would block."""
        if self.num_classes is not None and _labels(batch).device.type == "cpu":
            reject_labels(_labels(batch), self.num_classes)

    def loss_sum(self, model: nn.Module, batch: Any, weight: float) -> Tensor | Loss:
        """Cross-entropy in at least float32, summed over the labels that are not ignored."""
        if self.rule.is_shifted is None:
            return self._with_own_rule(model, batch)
        labels = shifted(_labels(batch)) if self.rule.is_shifted else _labels(batch)
        if self.rule.is_shifted and self.num_classes is None:  # of the first batch
            reject_shifted_twice(_inputs(batch), _labels(batch))
        if self.head is not None:
            self._note_classes(labels, self.head.layer.out_features)
            with self.head.takes(labels):
                total: Tensor = self.head.restored(_logits(_output(model, batch, passes_labels=self.rule.needs)))
            if not self.head.has_returned(total):
                raise ShoalError(
                    "the forward must return the output of the head that describe() names",
                    fix="remove head= from the description",
                    code="M040",
                )
            return total if weight else total * 0.0
        with self.tensor.split_logits():
            logits = _logits(_output(model, batch, passes_labels=self.rule.needs))
        total = self._sum_of(logits, labels, self.tensor.num_logits)
        return total if weight else total * 0.0

    def _with_own_rule(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        """The loss, and whether the model shifts labels, found from the loss that it computes itself."""
        labels = _labels(batch)
        if labels.is_floating_point():
            raise _not_whole(labels, "the model's logits", fix=OWN_LOSS)
        given = labels.clone()
        with _uncompiled(), _explain_bad_label():
            output = _output(model, batch, passes_labels=True)
        reject_changed(given, labels)
        own, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if not isinstance(own, Tensor) or own.dim():
            _reject_bare_loss(output)
            if holds_other(model):  # whose labels this forward may have dropped
                reject_copies(_inputs(batch), labels)
            if not _has_rows(_logits(output), labels):
                output = _output(model, batch, passes_labels=self.rule.needs)
            total = self._sum_of(_logits(output), labels, None)
            return Loss(total, Kind.PAIR, (labels != IGNORE).sum(), is_shifted=False)
        reject_shapes(logits, labels, fix=OWN_LOSS)
        assert isinstance(logits, Tensor)
        self._note_classes(labels, logits.shape[-1])
        is_shifted = is_shifting(own, logits, labels, adds_routers=getattr(output, "aux_loss", None) is not None)
        if is_shifted:
            reject_shifted_twice(_inputs(batch), labels)
            labels = shifted(labels)
        total, count = self._sum_of(logits, labels, None), (labels != IGNORE).sum()
        if count:
            reject_other_logits(own, total / count)
        return Loss(total, Kind.PAIR, count, is_shifted)

    def _sum_of(self, logits: Any, labels: Tensor, num_logits: int | None) -> Tensor:
        reject_shapes(logits, labels)
        self._note_classes(labels, num_logits or logits.shape[-1])
        rows = logits.to(wide(logits.dtype)).flatten(0, -2)
        if num_logits:
            return vocabulary_cross_entropy(rows, labels.flatten().long(), self.tensor, ignore=IGNORE)
        return F.cross_entropy(rows, labels.flatten().long(), ignore_index=IGNORE, reduction="sum")

    def _note_classes(self, labels: Tensor, num_classes: int) -> None:
        """Check the labels of the first batch. `check` reads those of later batches before they are on the device."""
        if self.num_classes is None and not labels.is_floating_point():
            reject_labels(labels, num_classes)
            self.num_classes = num_classes


class MeanOf:
    """A user's function that returns the mean over a microbatch, as loss functions do by default, or (sum, count)."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        self.is_compiled = False
        """Whether a compiler has captured parts of the model, whose calls must not be recorded."""

    def weight(self, batch: Any) -> int:
        """An estimate: valid labels if the batch has `labels`, else samples."""
        return weight_of(batch)

    def loss_sum(self, model: nn.Module, batch: Any, weight: float) -> Loss:
        """The value of the function, with its count if that can be found."""
        with _explain_bad_label():
            if torch.is_grad_enabled():
                return read_loss(self.function(model, batch))
            with CallRecorder() as recorder:
                called: Any = Unrecorded(model, recorder) if self.is_compiled else model
                returned = self.function(called, batch)
            return read_loss(returned, recorder)


def objective_of(loss: LossFunction | Objective | None) -> Objective:
    """The objective of `Run(loss=...)`."""
    if loss is None:
        return CrossEntropy()
    is_objective = not isinstance(loss, type) and hasattr(loss, "weight") and hasattr(loss, "loss_sum")
    if isinstance(loss, str) or not (callable(loss) or is_objective):
        raise ShoalError(
            f"loss must be a function, got {short(loss)}",
            fix="loss=lambda model, batch: ...; or fused_loss=True, False or None",
            code="T018",
        )
    if not callable(loss):
        return loss
    if isinstance(loss, nn.Module) or (getattr(loss, "__module__", None) or "").startswith("torch."):
        name = type(loss).__name__ if isinstance(loss, nn.Module) else loss.__name__
        raise ShoalError(
            f"{name} compares predictions with labels, but a loss is called as loss(model, batch)",
            fix=f"loss=lambda model, batch: {name}(model(batch[0]), batch[1]), or whatever your batches look like",
            code="T018",
        )
    return MeanOf(loss)


def sum_from_mean(mean: Tensor, weight: float) -> Tensor:
    """The sum of a mean over `weight` items. The mean over no item is NaN, and its sum is 0."""
    mean = mean.to(wide(mean.dtype))
    return mean * weight if weight else mean.nan_to_num(0.0) * 0.0


class _Called(Exception):
    """Carries the arguments with which a loss function called the model."""


class _Recorder(nn.Module):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        raise _Called(arguments, options)


class _Answer(nn.Module):
    """A stand-in for a model whose output is known."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.outputs = [output]

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if not self.outputs:
            raise ShoalError(
                "in a pipeline the loss must call the model once, got two calls",
                fix="call the model once in the loss, or pp=1",
                code="T019",
            )
        return self.outputs.pop()


def call_of(objective: Objective, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the objective calls the model, for a batch."""
    try:
        objective.loss_sum(_Recorder(), batch, 0.0)
    except _Called as called:
        arguments, options = called.args
        return arguments, options
    raise ShoalError(
        "the loss does not call the model", fix="loss=lambda model, batch: ... model(...) ...", code="T019"
    )


def uncallable(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[Problem]:
    """Find why a model cannot be called with these arguments: its forward has other names than the batch."""
    try:
        inspect.signature(model.forward).bind(*call[0], **call[1])
    except TypeError as error:
        given = ", ".join([f"{len(call[0])} without a name"] * bool(call[0]) + [repr(name) for name in call[1]])
        takes = str(inspect.signature(model.forward)).partition(" -> ")[0]
        yield Problem(
            "M057",
            f"a batch gives the model {given}, and the forward of {type(model).__name__} takes {takes}: {error}",
            f"def forward(self, {', '.join(call[1]) or 'inputs'}), or data of another kind (data.source,"
            " data.synthetic_kind)",
        )
    except ValueError:
        return  # a forward without a readable signature


def loss_of_output(objective: Objective, output: Any, batch: Any, weight: float) -> Tensor | Loss:
    """The objective's sum for an output of the model."""
    return objective.loss_sum(_Answer(output), batch, weight)


def _labels(batch: Any) -> Tensor:
    if isinstance(batch, Mapping) and "labels" in batch:
        labels = batch["labels"]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    else:
        raise _no_labels(batch)
    return labels  # type: ignore[no-any-return]


def reject_own_count(batch: Any) -> None:
    """Raise if a batch has a count, for which a model of transformers would divide its loss by itself: the parts of a
    batch would be divided by the count of the whole, and once more by their number."""
    if isinstance(batch, Mapping) and "num_items_in_batch" in batch:
        raise ShoalError(
            "a run divides the loss by the labels of the global batch, got a batch with num_items_in_batch",
            fix="batches without it: {name: value for name, value in batch.items() if name != 'num_items_in_batch'}",
            code="T105",
        )


def _inputs(batch: Any) -> Any:
    """All of a batch but its labels."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    return batch[0]


def reject_next_tokens(batch: Any) -> None:
    """Raise if the labels of a batch, which will be shifted, are the next tokens already."""
    reject_shifted_twice(_inputs(batch), _labels(batch))


def reject_copied_tokens(batch: Any) -> None:
    """Raise if the labels of a batch, which will not be shifted, are its tokens."""
    reject_copies(_inputs(batch), _labels(batch))


def shifted_batch(batch: Any) -> Any:
    """The batch with each label moved to the token before."""
    labels = shifted(_labels(batch))
    return {**batch, "labels": labels} if isinstance(batch, Mapping) else (batch[0], labels)


def _output(model: nn.Module, batch: Any, *, passes_labels: bool = False) -> Any:
    """The output of the model for a batch, with or without its labels."""
    inputs, labels = _inputs(batch), {"labels": _labels(batch)} if passes_labels else {}
    return model(**inputs, **labels) if isinstance(batch, Mapping) else model(inputs, **labels)


def _logits(output: Any) -> Any:
    return getattr(output, "logits", output)


def _uncompiled() -> AbstractContextManager[Any]:
    """Run without compilation: one call with other arguments is not worth it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


# ---- what is rejected ------------------------------------------------------------------------------------------------


def reject_shapes(logits: Any, labels: Tensor, *, fix: str = "") -> None:
    """Raise if cross-entropy cannot compare the logits and labels."""
    if not isinstance(logits, Tensor) or labels.is_floating_point():
        raise _not_whole(
            labels, kind_of(logits), fix=fix or "Run(loss=lambda model, batch: ...), the mean over a batch"
        )
    if not _has_rows(logits, labels):
        raise ShoalError(
            f"cross-entropy takes a label for each row of logits, not logits of shape {tuple(logits.shape)} and labels"
            f" of shape {tuple(labels.shape)}",
            fix=fix or f"{_fitted(logits, labels)}; or Run(loss=lambda model, batch: ...)",
            code="T020",
        )


def _fitted(logits: Tensor, labels: Tensor) -> str:
    """How to make labels and logits fit each other."""
    if labels.shape == logits.shape:
        return "labels.argmax(-1), for labels that are one-hot"
    if logits.dim() > 2 and labels.shape == (*logits.shape[:1], *logits.shape[2:]):
        return "return logits.movedim(1, -1) in the model: the classes are the last dim"
    return f"labels of shape {tuple(logits.shape[:-1])}"


def _has_rows(logits: Any, labels: Tensor) -> bool:
    """Whether there is a row of logits for each label."""
    if not isinstance(logits, Tensor) or not logits.dim() or not logits.shape[-1]:
        return False
    return logits.numel() // logits.shape[-1] == labels.numel()


def _not_whole(labels: Tensor, logits: str, *, fix: str) -> ShoalError:
    return ShoalError(
        f"cross-entropy, the loss of a run unless another is given, takes logits and whole numbers as labels, not"
        f" {logits} and {kind_of(labels)}",
        fix=fix,
        code="T021",
    )


@contextmanager
def _explain_bad_label() -> Iterator[None]:
    """Replace the IndexError of torch's cross-entropy for a label that is no class."""
    try:
        yield
    except IndexError as error:
        if not (str(error).startswith("Target") and "is out of bounds" in str(error)):
            raise
        raise ShoalError(
            f"a label of this batch is no class of the model: {error}",
            fix="as many outputs of the model as there are classes, and -100 for labels that do not count",
            code="T022",
        ) from error


def _reject_bare_loss(output: Any) -> None:
    """Raise if a model returns its loss alone, and not as `.loss` with `.logits`."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor) and not first.dim():
        raise ShoalError(
            f"this model takes labels and returns its own loss, as {kind_of(output)}, without .loss and .logits",
            fix="Run(loss=lambda model, batch: ...), the mean over a batch, or (sum, count)",
            code="T023",
        )


def reject_labels(labels: Tensor, num_classes: int) -> None:
    """Raise if a label is no class of the model, or if there is one class, whose cross-entropy is always 0."""
    if num_classes == 1:
        raise ShoalError(
            "the model returns one logit for each label, and the cross-entropy of one class is always 0",
            fix="Run(loss=lambda model, batch: F.binary_cross_entropy_with_logits(...)), or F.mse_loss(...)",
            code="T024",
        )
    if not labels.numel() or labels.is_floating_point():
        return
    low, high = (int(one) for one in torch.aminmax(labels))
    if low < 0:  # rarely: most data has no ignored labels
        low, high = (int(one) for one in torch.aminmax(labels.masked_fill(labels == IGNORE, 0)))
    if low < 0 or high >= num_classes:
        what = f"a label is {high}" if high >= num_classes else f"a label is {low}"
        raise ShoalError(
            f"{what}, and the model returns {num_classes} logits, for labels from 0 to {num_classes - 1}",
            fix="labels from 0, and -100 for those that do not count"
            if high < num_classes
            else f"{high + 1} classes or more in the model's last layer, or other labels",
            code="T022",
        )


def _no_labels(batch: Any) -> ShoalError:
    return ShoalError(
        f"this batch (a {type(batch).__name__} of {length(batch)} samples) has no labels that cross-entropy could use",
        fix="give batches as {..., 'labels': ...} or (inputs, labels), or say Run(loss=lambda model, batch: ...)",
        code="T025",
    )
