"""Correct the gradients of steps whose count is known only after their forwards.

A loss function that returns (sum, count) shows its count c in the forward of each microbatch, and gradients are
accumulated before the last one is known. So each backward starts from  s * degree / W  with an estimate W of the count
over the global batch, the same on every rank. The gradients are multiplied by  W / Σ c  once, when they are complete
and before they are clipped. Where Σ c is W, as with ignored labels of -100, the factor is 1.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.numerics.precision import wide
from shoal.train.loss.counting import Kind, Loss, are_alike, evidence_of
from shoal.train.loss.objective import sum_from_mean
from shoal.train.step.report import OpenStep

PAIR_FIX = (
    "return (sum, count) from the loss: return F.cross_entropy(..., reduction='sum'), (labels != -100).sum()"
    "  # a term that is a mean: sum + count * term"
)


def take(step: OpenStep, loss: Tensor | Loss, number: int, *, weight: float, is_alone: bool, may_wait: bool) -> Tensor:
    """The sum of a microbatch, from which its backward starts. Its count is recorded. `is_alone`: the microbatch is the
    full global batch, and its mean is the loss. `may_wait`: numbers on a GPU may be read."""
    if isinstance(loss, Tensor):
        return loss
    if step.is_mean_of_means:  # the value counts as it is, and is divided by the weight later
        mean = loss.value / loss.count_as(wide(loss.value.dtype)) if loss.kind is Kind.PAIR else loss.value
        return sum_from_mean(mean, 0.0 if step.is_stand_in(number) else max(1.0, weight))
    if loss.is_nonlinear and not is_alone:
        raise ShoalError(
            "the loss function returned a root, a maximum, a product or the like, whose parts cannot be put together",
            fix="return the mean itself, such as F.mse_loss(...) without .sqrt(); or one rank and no mb=",
            code="T041",
        )
    if not is_alone:
        _reject_foreign_count(loss, may_wait=may_wait)
        _warn_of_divided_mean(loss, len(step.microbatches))
    step.kinds.add(loss.kind)
    if loss.is_shifted is not None:
        step.seen_shifted.append(loss.is_shifted)
    if not is_deferred(loss.kind, is_alone=is_alone):
        return sum_from_mean(loss.value, weight)
    is_stand_in = step.is_stand_in(number)
    total = loss.total
    count = loss.count_as(torch.float64) * (0.0 if is_stand_in else 1.0)
    before = step.deferred_counts.setdefault(number, count)
    if before is not count and not torch.equal(before, count):
        raise ShoalError(
            f"two losses of one microbatch are means over {float(before):g} and {float(count):g} things",
            fix="run.backward(first + second), once for each microbatch; or (sum, count)",
            code="T016",
        )
    return total * 0.0 if is_stand_in else total


def _reject_foreign_count(loss: Loss, *, may_wait: bool) -> None:
    """Raise if a sum over labels is divided by more than it counts: by the count of a larger batch."""
    if loss.labels is None or loss.count is None:
        return
    counted, num_labels = loss.labels
    is_on_host = counted.device.type == "cpu" and not (isinstance(loss.count, Tensor) and loss.count.is_cuda)
    if not (is_on_host or may_wait) or counted.is_meta:
        return
    divisor = float(loss.count)
    if divisor > float(counted) and divisor != num_labels:  # the mean over all labels is one of this microbatch, too
        raise ShoalError(
            f"the loss function divides a sum over {float(counted):g} labels by {divisor:g}, as if that was the count"
            " of another batch than its microbatch: gradients would be divided twice",
            fix=f"a loss without a count from outside, such as num_items_in_batch; or {PAIR_FIX}",
            code="T107",
        )


def _warn_of_divided_mean(loss: Loss, num_microbatches: int) -> None:
    """Warn of a loss that is divided by the number of microbatches, as a loop without shoal has to do."""
    if num_microbatches > 1 and loss.divisor == num_microbatches:
        warnings.warn(
            f"the loss is divided by {num_microbatches}, the number of microbatches, by which shoal divides it, too:"
            f" gradients would be {num_microbatches} times too small. Leave the division out",
            stacklevel=6,
        )


def is_deferred(kind: Kind | None, *, is_alone: bool) -> bool:
    """Whether gradients must be corrected by the counts of the forwards."""
    return kind is Kind.PAIR or (kind is Kind.COUNTED and not is_alone)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The sums of a step over all ranks, on the device."""

    loss: Tensor
    correction: Tensor
    """The factor of the gradients."""
    num_shifted: Tensor
    """Ranks on which the model shifts labels, and ranks on which it does not."""
    num_unshifted: Tensor


def agree(step: OpenStep, loss: Tensor, *, estimate: float, is_owner_of_loss: bool, world_size: int) -> Agreed:
    """Sum losses and counts over all ranks. Of ranks with the same values, one adds them (`is_owner_of_loss`)."""
    count = (
        torch.stack(list(step.deferred_counts.values())).sum()
        if step.deferred_counts and is_owner_of_loss
        else torch.zeros_like(loss)
    )
    seen = [any(step.seen_shifted), not all(step.seen_shifted)]
    flags = [torch.full((), float(flag), dtype=torch.float64, device=loss.device) for flag in seen]
    numbers = torch.stack([loss.double(), count.double(), *flags])
    if world_size > 1:
        dist.all_reduce(numbers)
    total, count, num_shifted, num_unshifted = numbers
    if not count.is_cuda and not count:
        raise ShoalError(
            "nothing of this global batch counts: the loss's counts are all 0",
            fix="return (loss_sum, count), with a count above 0, from the loss function",
            code="T013",
        )
    correction = estimate / count
    return Agreed((total * correction).to(loss.dtype), correction, num_shifted, num_unshifted)


def convention(agreed: Agreed) -> bool | None:
    """Whether the model shifts labels; None: not visible in this step."""
    shifts, does_not = bool(agreed.num_shifted), bool(agreed.num_unshifted)
    if shifts and does_not:
        raise ShoalError(
            "the model's own loss shifts the labels of some microbatches of this step and not those of others",
            fix="Run(loss=lambda model, batch: model(**batch).loss)",
            code="T016",
        )
    return shifts if shifts or does_not else None


def agree_on_kind(step: OpenStep, world: World) -> Kind | None:
    """The kind of the losses of a step, on all ranks: the first stages of a pipeline have none. Every rank calls it.
    Raise on all ranks if there are several kinds, since their backwards started from different weights."""
    numbers = world.all_reduce_host([float(kind in step.kinds) for kind in Kind]).wait()
    found = [kind for kind, number in zip(Kind, numbers, strict=True) if number]
    if len(found) > 1:
        raise ShoalError(
            f"the loss function returned {_WORDS[found[0]]} for one microbatch and {_WORDS[found[1]]} for another",
            fix=f"return the same for each: {PAIR_FIX}",
            code="T016",
        )
    return found[0] if found else None


def reject_uncounted(step: OpenStep, kind: Kind, world: World) -> None:
    """Raise on a mean or a sum with an unknown count that cannot be combined with others. Every rank calls it, and all
    raise or none does."""
    if kind is Kind.SUM:
        raise ShoalError(
            "the loss function returned a sum; its microbatches and ranks are put together as means",
            fix=PAIR_FIX,
            code="T017",
        )
    found = [evidence_of(step.given)] if step.given is not None else []
    numbers = [sum(column) for column in zip(*(one.numbers for one in found), strict=True)] or [0.0] * 3
    sums = world.all_reduce_host([*numbers, float(len(found))]).wait()
    if not are_alike(*sums):
        why = "some labels or elements do not count" if sums[0] else "samples have other shapes on other ranks"
        raise uncounted(why)


def uncounted(why: str) -> ShoalError:
    """The error for a mean with an unknown count."""
    return ShoalError(
        f"the loss function returned a mean over an unknown number of things, and {why}: means of microbatches and"
        " ranks cannot be put together",
        fix=PAIR_FIX,
        code="T017",
    )


_WORDS: dict[Kind, str] = {
    Kind.MEAN: "a mean over an unknown number of things",
    Kind.SUM: "a sum",
    Kind.COUNTED: "a mean",
    Kind.PAIR: "(sum, count)",
}
