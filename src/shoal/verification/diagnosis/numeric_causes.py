"""Causes that the values themselves show: missing reductions, zeros, wrong scales, norms and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch

from shoal.verification.compare import relative_difference
from shoal.verification.diagnosis.evidence import (
    MICROBATCHES,
    REDUCED,
    Evidence,
    common_factor,
    factor_between,
    factor_of_numbers,
    square_of_slice,
)
from shoal.verification.diagnosis.wording import joined


def not_comparable(e: Evidence) -> str | None:
    """A tensor is missing, has another shape, or is not finite."""
    name, note = e.difference.tensor, e.difference.note
    if e.difference.kind == "loss" and not math.isfinite(e.candidate.loss):
        return f"The loss of the candidate is {e.candidate.loss}: look for an overflow or for uninitialized memory."
    if not note or e.difference.kind == "replicas":
        return None
    if name is None:
        return f"Nothing was compared: {note}."
    if "does not have it" in note:
        stage = f" (it belongs to stage {e.piece(name).stage})" if e.context.num_stages > 1 else ""
        return f"{name}: {note}. No rank holds it, or no backward reached it{stage}."
    if "shape" in note:
        cut = f" along dim {e.piece(name).tp_dim} over tp" if e.is_cut(name) else ""
        return f"{name}: {note}. Its shards were not joined as they were cut{cut}."
    if "not finite" in note:
        return f"{name}: {note}. Look for an overflow, or for a buffer that was read before it was written."
    return f"{name}: {note}. It has another name on one device, or is a copy that should not exist."


def replicas_disagree(e: Evidence) -> str | None:
    """Ranks that should hold equal values do not: a reduction or a broadcast is missing."""
    found = [one for one in e.candidate.disagreements if not one.difference <= e.context.tolerance]
    found = [one for one in found if one.what == "gradient"] or found
    if not found:
        return None
    first, also = found[0], sorted({one.axis for one in found} - {found[0].axis})
    other = f" (and along {', '.join(also)})" if also else ""
    where = f"Ranks along {first.axis}{other} hold different {first.what}s of {first.tensor}"
    if first.what == "weight":
        return f"{where} after gradients that agree: they did not start equal, or the optimizer differs along it."
    if first.axis == "tp":
        return f"{where}: what each tp rank computed is a part, and its sum over tp is missing."
    return f"{where}: the reduction over {first.axis} is missing."


def gradients_not_cleared(e: Evidence) -> str | None:
    """A gradient includes that of the step before."""
    if e.difference.kind != "gradient" or e.difference.step == 0:
        return None
    before = e.candidates[e.difference.step - 1].gradients
    for name in e.wrong:
        if name not in before or before[name].shape != e.reference.gradients[name].shape:
            return None
        if relative_difference(e.reference.gradients[name] + before[name], e.candidate.gradients[name]) > e.loose:
            return None
    step = e.difference.step
    return f"{e.named(e.wrong)} that of step {step} plus that of step {step - 1}: gradients are not cleared."


def all_zero(e: Evidence) -> str | None:
    """A gradient is zero: no backward wrote it."""
    zero = [name for name in e.wrong if not e.candidate.gradients[name].any()] if e.is_about_gradients else []
    if not zero:
        return None
    if all(e.piece(name).role == "router" for name in zero):
        return f"{e.named(zero)} zero: probably the results of experts are summed without the router's weights."
    stages = {e.piece(name).stage for name in zero}
    of_stage = [name for name in e.reference.gradients if {e.piece(name).stage} == stages]
    if e.context.num_stages > 1 and len(stages) == 1 and set(of_stage) == set(zero):
        return f"Every gradient of stage {min(stages)} is zero: its backward never ran, or its result was dropped."
    over = f", or the reduction over {' and '.join(e.data_axes())} was dropped" if e.data_axes() else ""
    return f"{e.named(zero)} zero: no backward reached it{over}."


def constant_factor(e: Evidence) -> str | None:
    """All wrong values have one factor. A factor that is a degree names the reduction."""
    if e.difference.kind == "loss":
        k, what, names = factor_of_numbers(e.reference.loss, e.candidate.loss), "The loss is", []
        if k is None or not _sources(k, e):
            return None  # any two losses have some ratio
    elif e.difference.kind == "gradient":
        k, what, names = e.factors(e.wrong), e.named(e.wrong), e.wrong
    else:
        return None
    if k is None or (
        not (sources := _sources(k, e, names)) and all(e.reference.gradients[n].numel() < 2 for n in names)
    ):
        return None  # and so do any two numbers
    return _scale_in_words(k, what, sources)


def wrong_norm(e: Evidence) -> str | None:
    """Every gradient is right and their norm is not: find the part of the gradients that has this norm."""
    if e.difference.kind != "grad_norm":
        return None
    for words, norm in _wrong_norms(e):
        if math.isclose(norm, e.candidate.grad_norm, rel_tol=e.loose):
            return f"Every gradient is right, but the gradient norm is {words}."
    ratio = factor_of_numbers(e.reference.grad_norm, e.candidate.grad_norm)
    if ratio and (found := _sources(ratio**2, e)):
        return f"Every gradient is right, but the square of the norm is {ratio**2:g} times too large or small, and" + (
            f" that is {joined(_degree_in_words(one) for one in found)}: the same values are counted several times."
        )
    axes = [axis for axis in REDUCED if axis in e.degrees()]
    over = f" over {', '.join(axes)}" if axes else ""
    return f"Every gradient is right, but their norm is not: the sum of squares{over} is wrong."


def wrong_update(e: Evidence) -> str | None:
    """Gradients are right and weights are not: compare the updates, which scale with clipping and learning rate."""
    before = e.candidates[e.difference.step - 1].weights if e.difference.step else e.context.initial
    if e.difference.kind != "weight" or any(name not in before for name in e.wrong):
        return None
    unmoved = [name for name in e.wrong if torch.equal(before[name], e.candidate.weights[name])]
    if unmoved:
        return f"{e.named(unmoved)} unchanged by the step: the optimizer does not update it on its rank."
    expected, got = e.tensors
    close = min(100 * e.loose, 0.02)  # an update is the small difference of two weights
    k = common_factor(
        [factor_between(expected[name] - before[name], got[name] - before[name], close) for name in e.wrong], close
    )
    norm, clip = e.reference.grad_norm, e.context.clip
    if k is None:
        return None
    if clip is not None and norm > clip and math.isclose(k, norm / clip, rel_tol=close):
        return (
            f"Updates are {k:.6g} times too large, which is norm / clip = {norm:.6g} / {clip:g}: nothing was clipped."
        )
    if clip is not None and norm > clip and math.isclose(k, clip / norm, rel_tol=close):
        return f"Updates are {1 / k:.6g} times too small, which is norm / clip = {norm:.6g} / {clip:g}: clipped twice."
    return f"Updates are {k:.6g} times those of one device: another learning rate, or clipped by another norm."


def _sources(k: float, e: Evidence, names: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The degrees, or else the pairs of degrees, whose product is k or 1/k."""
    degrees, size = e.degrees(), max(k, 1 / k) if k > 0 else 0.0
    if e.context.layout.ep > 1 and e.all_experts(names) and math.isclose(size, e.context.layout.ep, rel_tol=e.loose):
        return [("ep",)]  # all other tensors are right, so no other axis is the source
    for count in (1, 2):
        found = [
            those
            for those in combinations(degrees, count)
            if "data" not in those or count == 1
            if math.isclose(math.prod(degrees[one] for one in those), size, rel_tol=10 * e.loose)
        ]
        if ("tp",) in found and names and not any(map(e.is_cut, names)) and any(map(e.is_cut, e.reference.gradients)):
            return [("tp",)]  # tensors that tp cuts are right, so no other axis is the source
        if found:
            return found
    return []


def _scale_in_words(k: float, what: str, sources: Sequence[tuple[str, ...]]) -> str:
    size = (
        f"{max(k, 1 / k):.6g} times too {'large' if k > 1 else 'small'}" if k > 0 else f"{k:.6g} times the right value"
    )
    if not sources:
        return f"{what} {size}, and otherwise right: a scale is wrong that is no degree of this plan."
    if sources == [("ep",)]:
        reason = "were probably not divided by" if k > 1 else "were probably divided once too often by"
        return f"{what} {size}: the gradients of experts {reason} ep={max(k, 1 / k):.6g}."
    over = joined((" and ".join(one) for one in sources), "or")
    reason = f"summed over {over} where the mean is expected, or reduced over it twice"
    if k < 1:
        reason = f"divided once too often for {over}, or a part of it taken where the sum is expected"
    return f"{what} {size}, which is {joined(map(_degree_in_words, sources))}: {reason}."


def _degree_in_words(those: tuple[str, ...]) -> str:
    return " x ".join("the number of microbatches" if one == MICROBATCHES else f"the degree of {one}" for one in those)


def _wrong_norms(e: Evidence) -> Iterator[tuple[str, float]]:
    """Norms that are often mistaken for the global norm."""
    squares = {name: gradient.double().square().sum().item() for name, gradient in e.reference.gradients.items()}
    for stage in range(e.context.num_stages if e.context.num_stages > 1 else 0):
        mine = sum(square for name, square in squares.items() if e.piece(name).stage == stage)
        yield f"that of stage {stage} alone: its square is not summed over pp", math.sqrt(mine)
    degree = e.context.layout.tp
    if degree > 1:
        counted = sum(square * (1 if e.is_cut(name) else degree) for name, square in squares.items())
        yield f"that with uncut tensors counted {degree} times, once per tp rank", math.sqrt(counted)
    for axis in ("tp", "ep", "dp_shard" if e.context.layout.cp == 1 else "dp_shard_cp"):
        for index in range(e.context.layout.degree(axis) if e.context.layout.degree(axis) > 1 else 0):
            mine = sum(square_of_slice(e, name, axis, index) for name in squares)
            yield f"that of {axis} rank {index} alone: its square is not summed over {axis}", math.sqrt(mine)
