"""Compare two runs of the same training, tensor by tensor: are they equal, and what differs first?

`torch.testing.assert_close` compares two tensors and raises. A verification compares all of them, over several steps,
in the order of computation: the first difference is the cause, and later ones follow from it. Nothing here raises, and
nothing is equal by accident. A tensor that is missing, has another shape or contains a NaN differs by infinity, and two
runs without observations are not equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["loss", "gradient", "grad_norm", "replicas", "weight"]

ROUNDING_FLOOR = 1e-3
"""The difference of a tensor is relative to its own largest value, but at least to this part of the largest of all
gradients (or weights) of the step. Some gradients are zero in theory (the bias before a batch norm, the bias of an
attention key) and rounding noise in practice, and noise never equals noise."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks along `axis` that should hold equal values of `tensor`, and do not."""

    axis: str
    what: Literal["gradient", "weight"]
    tensor: str
    difference: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One optimizer step of one run. Tensors are full, on the CPU, under their names in the original model."""

    loss: float
    grad_norm: float
    """The global norm before clipping."""

    gradients: Mapping[str, Tensor]
    """Before clipping, in the order of the model."""

    weights: Mapping[str, Tensor]
    """After the update."""

    disagreements: tuple[Disagreement, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs by more than the tolerance."""

    step: int
    kind: Kind
    tensor: str | None
    difference: float
    """Relative; infinite where the values cannot be compared."""

    note: str = ""
    """Why the values cannot be compared."""

    axis: str | None = None
    """The axis along which replicas differ."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of a tensor from the reference."""

    difference: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class StepGap:
    """One step of both runs: the candidate's loss and norm, and the largest relative difference of each kind."""

    loss: float
    grad_norm: float
    loss_difference: float
    grad_norm_difference: float
    gradient: float
    gradient_tensor: str | None
    weight: float
    weight_tensor: str | None
    replicas: float = 0.0


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest relative difference over all steps, by kind, and the tensor of the largest."""

    loss: float = 0.0
    grad_norm: float = 0.0
    grad: float = 0.0
    weight: float = 0.0
    replicas: float = 0.0
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two runs are equal within the tolerance, their largest differences, and the first difference."""

    tolerance: float
    first: Difference | None
    """The earliest difference in the order of computation. None: there is none."""

    worst: Worst
    steps: tuple[StepGap, ...] = field(default=())
    gradients: Mapping[str, float] = field(default_factory=dict)
    """Tensor → the largest difference of its gradient over all steps."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tensor → the largest difference of its values over all steps."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.first is None


def compare(reference: Sequence[Observation], candidate: Sequence[Observation], *, tolerance: float) -> Comparison:
    """Compare every step of the candidate with the same step of the reference.

    Within a step the order of computation is: loss, gradients in the order of the model, gradient norm, agreement of
    replicas, weights.
    """
    found: list[Difference] = []
    steps: list[StepGap] = []
    of_gradients: dict[str, float] = {}
    of_weights: dict[str, float] = {}
    for step, (expected, got) in enumerate(zip(reference, candidate, strict=False)):
        gradients, weights = gaps(expected.gradients, got.gradients), gaps(expected.weights, got.weights)
        steps.append(_summary(expected, got, gradients, weights))
        _raise_to(of_gradients, gradients)
        _raise_to(of_weights, weights)
        every = _in_order(step, steps[-1], gradients, weights, got.disagreements)
        found += [difference for difference in every if not difference.difference <= tolerance]
    if not steps or len(reference) != len(candidate):
        note = f"the reference made {len(reference)} steps and the candidate {len(candidate)}"
        found.append(Difference(len(steps), "loss", None, math.inf, note))
    return Comparison(tolerance, found[0] if found else None, _worst(steps), tuple(steps), of_gradients, of_weights)


def _raise_to(largest: dict[str, float], gaps: Mapping[str, Gap]) -> None:
    """Raise the largest difference of each tensor to that of a step."""
    for name, gap in gaps.items():
        largest[name] = max(largest.get(name, 0.0), gap.difference)


def gaps(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> dict[str, Gap]:
    """The difference of each tensor, in the reference's order; tensors that only the candidate has come last."""
    floor = ROUNDING_FLOOR * max((_largest(tensor) for tensor in reference.values()), default=0.0)
    floor = floor if math.isfinite(floor) else 0.0
    return {
        name: _gap(reference.get(name), candidate.get(name), floor)
        for name in (*reference, *(name for name in candidate if name not in reference))
    }


def wrong(gaps: Mapping[str, Gap], tolerance: float) -> list[str]:
    """The names of tensors that differ by more than the tolerance."""
    return [name for name, gap in gaps.items() if not gap.difference <= tolerance]


def relative_difference(reference: Tensor, candidate: Tensor, *, floor: float = 0.0) -> float:
    """max|reference - candidate| / max|reference|; of an all-zero reference max|candidate|. Infinite if not finite.

    >>> relative_difference(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0]))
    0.25
    """
    if reference.shape != candidate.shape:
        return math.inf
    expected, got = _wide(reference), _wide(candidate)
    return _ratio(_largest(expected - got), _largest(expected), floor)


def scalar_difference(reference: float, candidate: float) -> float:
    """The relative difference of two numbers, by the same rule."""
    return _ratio(abs(reference - candidate), abs(reference))


def _gap(reference: Tensor | None, candidate: Tensor | None, floor: float) -> Gap:
    if candidate is None:
        return Gap(math.inf, "the candidate does not have it")
    if reference is None:
        return Gap(math.inf, "only the candidate has it")
    if reference.shape != candidate.shape:
        return Gap(math.inf, f"its shape is {tuple(candidate.shape)} instead of {tuple(reference.shape)}")
    for whose, tensor in (("the reference", reference), ("the candidate", candidate)):
        if not math.isfinite(_largest(tensor)):
            return Gap(math.inf, f"it is not finite in {whose}")
    return Gap(relative_difference(reference, candidate, floor=floor))


def _summary(
    expected: Observation, got: Observation, gradients: Mapping[str, Gap], weights: Mapping[str, Gap]
) -> StepGap:
    gradient_tensor, weight_tensor = _largest_gap(gradients), _largest_gap(weights)
    return StepGap(
        loss=got.loss,
        grad_norm=got.grad_norm,
        loss_difference=scalar_difference(expected.loss, got.loss),
        grad_norm_difference=scalar_difference(expected.grad_norm, got.grad_norm),
        gradient=gradients[gradient_tensor].difference if gradient_tensor is not None else math.inf,
        gradient_tensor=gradient_tensor,
        weight=weights[weight_tensor].difference if weight_tensor is not None else math.inf,
        weight_tensor=weight_tensor,
        replicas=max((_or_inf(one.difference) for one in got.disagreements), default=0.0),
    )


def _in_order(
    step: int,
    summary: StepGap,
    gradients: Mapping[str, Gap],
    weights: Mapping[str, Gap],
    disagreements: Sequence[Disagreement],
) -> Iterator[Difference]:
    """All differences of a step, in the order of computation."""
    yield Difference(step, "loss", None, summary.loss_difference)
    yield from _of_tensors(step, "gradient", gradients)
    yield Difference(step, "grad_norm", None, summary.grad_norm_difference)
    for one in disagreements:
        note = f"ranks along {one.axis} hold different {one.what}s"
        yield Difference(step, "replicas", one.tensor, _or_inf(one.difference), note, one.axis)
    yield from _of_tensors(step, "weight", weights)


def _of_tensors(step: int, kind: Kind, gaps: Mapping[str, Gap]) -> Iterator[Difference]:
    if not gaps:
        yield Difference(step, kind, None, math.inf, f"no {kind} was observed")
    for name, gap in gaps.items():
        yield Difference(step, kind, name, gap.difference, gap.note)


def _worst(steps: Sequence[StepGap]) -> Worst:
    if not steps:
        return Worst(math.inf, math.inf, math.inf, math.inf, math.inf)

    def largest(of: Callable[[StepGap], float]) -> float:
        return max(of(step) for step in steps)

    named = [pair for s in steps for pair in ((s.gradient, s.gradient_tensor), (s.weight, s.weight_tensor))]
    return Worst(
        loss=largest(lambda step: step.loss_difference),
        grad_norm=largest(lambda step: step.grad_norm_difference),
        grad=largest(lambda step: step.gradient),
        weight=largest(lambda step: step.weight),
        replicas=largest(lambda step: step.replicas),
        tensor=max(named, key=lambda pair: pair[0])[1],
    )


def _largest_gap(gaps: Mapping[str, Gap]) -> str | None:
    return max(gaps, key=lambda name: gaps[name].difference, default=None)


def _largest(tensor: Tensor) -> float:
    """max|tensor|; 0 for an empty tensor; infinite if any value is not finite."""
    values = _wide(tensor).abs()
    return _or_inf(values.max().item()) if values.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """The tensor as float64 or complex128, so that different dtypes can be compared."""
    dense = tensor.detach().to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _ratio(difference: float, size: float, floor: float = 0.0) -> float:
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / (max(size, floor) or 1.0)


def _or_inf(number: float) -> float:
    """Replace NaN by infinity, so that no comparison loses it."""
    return number if math.isfinite(number) else math.inf
