"""From where two runs part to what was probably done wrong: one or two sentences that a person can act on.

A wrong layout leaves traces. A reduction that was forgotten leaves replicas that disagree, one that was done twice
leaves a factor that is a degree, a swapped slice leaves its values in another place. Each trace is one small rule
below; a rule looks at the evidence and speaks or stays silent, and the first of `RULES` that speaks is believed.
Certain traces stand before vague ones, and the last rule always speaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from shoal.verification.compare import Difference, Observation, relative_difference
from shoal.verification.diagnosis.evidence import (
    MICROBATCHES,
    REDUCED,
    Context,
    Evidence,
    by_expert,
    common_factor,
    factor_between,
    factor_of_numbers,
    find_slice,
    nearest_slices,
    slices,
    square_of_slice,
)


def likely_cause(
    difference: Difference, reference: Sequence[Observation], candidate: Sequence[Observation], context: Context
) -> str:
    """What was probably done wrong, naming the axis or the tensor."""
    evidence = Evidence(difference, reference, candidate, context)
    if difference.step >= min(len(reference), len(candidate)):
        return f"There is nothing to compare at step {difference.step}: {difference.note}."
    return next(text for rule in RULES if (text := rule(evidence)))


# ---- certain traces -------------------------------------------------------------------------------------------------


def not_comparable(e: Evidence) -> str | None:
    """A tensor that is missing, misshapen or not finite."""
    name, note = e.difference.tensor, e.difference.note
    if e.difference.kind == "loss" and not math.isfinite(e.candidate.loss):
        return f"The loss of the candidate is {e.candidate.loss}: look for an overflow or for memory never written."
    if not note or e.difference.kind == "replicas":
        return None
    if name is None:
        return f"Nothing was compared: {note}."
    if "does not have it" in note:
        stage = f" (it belongs to stage {e.piece(name).stage})" if e.context.num_stages > 1 else ""
        return f"{name}: {note}. No rank holds it, or no backward reached it{stage}."
    if "shape" in note:
        cut = f" along dim {e.piece(name).tp_dim} over tp" if e.is_cut(name) else ""
        return f"{name}: {note}. Its pieces were not put together as they were cut{cut}."
    if "not finite" in note:
        return f"{name}: {note}. Look for an overflow, or for a buffer that was read before it was written."
    return f"{name}: {note}. It has another name on one device, or is a copy that should not exist."


def replicas_disagree(e: Evidence) -> str | None:
    """Ranks that should hold the same and do not: whatever should make them equal did not happen."""
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
    """A gradient that still holds the one of the step before."""
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
    """A gradient that nobody wrote."""
    zero = [name for name in e.wrong if not e.candidate.gradients[name].any()] if _is_about_gradients(e) else []
    if not zero:
        return None
    if all(e.piece(name).role == "router" for name in zero):
        return f"{e.named(zero)} zero: probably the results of experts are summed without the router's weights."
    stages = {e.piece(name).stage for name in zero}
    of_stage = [name for name in e.reference.gradients if {e.piece(name).stage} == stages]
    if e.context.num_stages > 1 and len(stages) == 1 and set(of_stage) == set(zero):
        return f"Every gradient of stage {min(stages)} is zero: its backward never ran, or was not kept."
    over = f", or the reduction over {' and '.join(e.data_axes())} was dropped" if e.data_axes() else ""
    return f"{e.named(zero)} zero: no backward got there{over}."


def constant_factor(e: Evidence) -> str | None:
    """Right but for a scale. A scale that is a degree tells which reduction."""
    if e.difference.kind == "loss":
        k, what, names = factor_of_numbers(e.reference.loss, e.candidate.loss), "The loss is", []
        if k is None or not _sources(k, e):
            return None  # two different losses always have some ratio
    elif e.difference.kind == "gradient":
        k, what, names = e.factors(e.wrong), e.named(e.wrong), e.wrong
    else:
        return None
    if k is None or (
        not (sources := _sources(k, e, names)) and all(e.reference.gradients[n].numel() < 2 for n in names)
    ):
        return None  # so do two different numbers
    return _scale_in_words(k, what, sources)


def wrong_norm(e: Evidence) -> str | None:
    """Every gradient is right and their norm is not: find the part of them whose norm it is."""
    if e.difference.kind != "grad_norm":
        return None
    for words, norm in _wrong_norms(e):
        if math.isclose(norm, e.candidate.grad_norm, rel_tol=e.loose):
            return f"Every gradient is right, but the gradient norm is {words}."
    ratio = factor_of_numbers(e.reference.grad_norm, e.candidate.grad_norm)
    if ratio and (found := _sources(ratio**2, e)):
        return f"Every gradient is right, but the square of the norm is {ratio**2:g} times too large or small, and" + (
            f" that is {_and(_degree_in_words(one) for one in found)}: the same values are counted several times."
        )
    axes = [axis for axis in REDUCED if axis in e.degrees()]
    over = f" over {', '.join(axes)}" if axes else ""
    return f"Every gradient is right, but their norm is not: the sum of squares{over} is not taken as it should be."


def wrong_update(e: Evidence) -> str | None:
    """Gradients are right and weights are not: compare the updates, which clipping and the learning rate scale."""
    before = e.candidates[e.difference.step - 1].weights if e.difference.step else e.context.initial
    if e.difference.kind != "weight" or any(name not in before for name in e.wrong):
        return None
    unmoved = [name for name in e.wrong if torch.equal(before[name], e.candidate.weights[name])]
    if unmoved:
        return f"{e.named(unmoved)} what it was before the step: the optimizer does not update it on its rank."
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


# ---- traces of attention, routers and experts -----------------------------------------------------------------------


def experts_not_in_place(e: Evidence) -> str | None:
    """An update moves weights less than two experts are apart: the initial values that they are near tell who they
    are."""
    for name in e.of_role("expert"):
        now, initial = (by_expert(e, name, tensors) for tensors in (e.candidates[0].weights, e.context.initial))
        order = nearest_slices(now, initial) if now and initial else []
        if order != list(range(len(order))):
            ranks = ": ranks along ep hold each other's" if e.context.layout.ep > 1 else ""
            lie = ", ".join(map(str, order))
            return f"The experts of {e.piece(name).module} lie in the order {lie}, as seen in {name}{ranks}."
    return None


def experts_without_rows(e: Evidence) -> str | None:
    """An expert that should learn from tokens of this batch, and has learned nothing in any of its weights."""
    ep = e.context.layout.ep
    for module in dict.fromkeys(e.piece(name).module for name in e.of_role("expert")) if _is_about_gradients(e) else ():
        learns = [_learns(e, module, tensors) for tensors in e.tensors]
        idle = [index for index, (wanted, seen) in enumerate(zip(*learns, strict=False)) if wanted and not seen]
        if idle and any(learns[1]):
            ranks = sorted({index * ep // len(learns[1]) for index in idle})
            where, way = (f" (of ep rank {_and(ranks)})", " over ep") if ep > 1 else ("", "")
            return (
                f"Expert {_and(idle)} of {module}{where} gets no gradient, though tokens of this batch chose it: their"
                f" rows are probably lost on their way{way}."
            )
    return None


def _learns(e: Evidence, module: str, gradients: Mapping[str, Tensor]) -> list[bool]:
    """Whether each expert has a gradient in any of its weights."""
    pieces = [by_expert(e, name, gradients) for name in e.of_role("expert", module)]
    return [any(bool(piece.any()) for piece in expert) for expert in zip(*pieces, strict=False)]


def broken_attention(e: Evidence) -> str | None:
    """Behind an attention gradients are right, before it they are not."""
    names = [name for name in e.wrong if e.piece(name).role == "attention"]
    if e.difference.kind != "gradient" or e.context.layout.cp == 1 or not names:
        return None
    module = e.piece(names[-1]).module
    mine = e.of_role("attention", module)
    bad, good = ([name for name in mine if (name in e.wrong) is wanted] for wanted in (True, False))
    if not good or len(e.wrong) == len(bad):  # wrong behind it as well; or right before it
        return None
    return (
        f"The loss is right, and in {module} the gradient of {_and(_inside(module, good))} is right but that of"
        f" {_and(_inside(module, bad))} is not: probably the backward of attention over cp (what other ranks find for"
        " queries, keys and values has to come home and be summed)."
    )


def broken_router(e: Evidence) -> str | None:
    """A router is wrong whose experts are right."""
    names = [name for name in e.wrong if e.piece(name).role == "router"]
    if e.difference.kind != "gradient" or not names:
        return None
    experts = e.of_role("expert", e.piece(names[-1]).module)
    if not experts or any(name in e.wrong for name in experts):
        return None
    if len(names) == len(e.wrong):
        axes = _and(e.data_axes() + ["tp"] * (e.context.layout.tp > 1), "or")
        return f"{e.named(names)} wrong and no other is: probably a router's is not reduced over {axes or 'ranks'}."
    whole = " and over the whole sequence, not a rank's tokens" if e.context.layout.cp * e.context.layout.tp > 1 else ""
    auxiliary = (
        f"the auxiliary loss (its mean is over the sequences of the global batch, each counted once{whole}), or "
    )
    return (
        f"The loss is right, the gradient of {names[-1]} is wrong and those of its experts are right: probably"
        f" {auxiliary if e.piece(names[-1]).has_loss else ''}the gradient of the weights with which results are summed."
    )


def unlike_biases(e: Evidence) -> str | None:
    """The biases of routers, which follow from loads alone, are the first thing that differs."""
    if e.difference.kind != "weight" or not e.wrong or not all(name.endswith("router.bias") for name in e.wrong):
        return None
    return (
        f"{e.named(e.wrong)} wrong and all else of the step is right: probably the loads from which biases follow are"
        " not those of the global batch, summed over all ranks and microbatches."
    )


def broken_dispatch(e: Evidence) -> str | None:
    """Routers and experts are right, and what they send back is not."""
    names = list(e.reference.gradients)
    sparse = [name for name in names if e.piece(name).role in ("router", "expert")]
    if e.difference.kind != "gradient" or e.context.layout.ep == 1 or not sparse:
        return None
    module = e.piece(sparse[-1]).module
    mine = e.of_role("router", module) + e.of_role("expert", module)
    before = names[: names.index(mine[0])]
    if not before or not set(before) <= set(e.wrong) or set(mine) & set(e.wrong):
        return None
    return (
        f"The loss and the gradients of {module} are right, and all before it are wrong: probably the gradients of rows"
        " that come home over ep."
    )


_FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|kv_proj|gate_up|up_gate", re.IGNORECASE)


def fused_projection(e: Evidence) -> str | None:
    """Queries, keys and values come from one matrix, and tp cuts it into rows that are not a part of each."""
    if e.difference.kind != "loss" or e.difference.step or e.context.layout.tp == 1:
        return None
    for name, gradient in e.reference.gradients.items():
        is_cut = e.piece(name).tp_dim == 0 and gradient.dim() == 2
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if is_cut and (_FUSED.search(layer) or gradient.shape[0] == 3 * gradient.shape[1]):
            return (
                f"The forward is wrong, and tp cuts {name}, of shape {tuple(gradient.shape)}, into blocks of rows:"
                " if it holds queries, keys and values one after the other (or gate and up), a tp rank gets rows of one"
                " of them and takes them for all. Use one layer for each, or let the rows of one head lie side by side:"
                " unflatten(-1, (heads, 3, head_dim))."
            )
    return None


# ---- traces by place ------------------------------------------------------------------------------------------------


def only_what_tp_does_not_cut(e: Evidence) -> str | None:
    """The weights that every tp rank holds whole are wrong, those that it holds a piece of are right."""
    cut = [name for name in e.reference.gradients if e.is_cut(name)]
    if e.difference.kind != "gradient" or e.context.layout.tp == 1 or not cut or any(map(e.is_cut, e.wrong)):
        return None
    scope = "exactly the" if len(e.wrong) == len(e.reference.gradients) - len(cut) else "among the"
    return (
        f"{e.named(e.wrong)} wrong, {scope} tensors that tp does not cut, while those it cuts are right:"
        " partial gradients are not summed over tp."
    )


def slices_swapped(e: Evidence) -> str | None:
    """Every slice is there, but not in its place."""
    for name, axis, dim, expected, got in slices(e):
        order = [find_slice(piece, expected, e.loose) for piece in got]
        if None not in order and len(set(order)) == len(order) and order != list(range(len(order))):
            seen = ", ".join(str(index) for index in order)
            return f"{name} has its slices along dim {dim} in the order {seen}: {axis} ranks hold each other's piece."
    return None


def some_slices(e: Evidence) -> str | None:
    """Some ranks have their piece right, and others have not."""
    for name, axis, dim, expected, got in slices(e):
        pairs = enumerate(zip(expected, got, strict=True))
        right = {i: relative_difference(a, b) <= e.loose for i, (a, b) in pairs if a.any()}  # zeros are no evidence
        if any(right.values()) and not all(right.values()):
            bad, good = (", ".join(str(i) for i, ok in right.items() if ok is wanted) for wanted in (False, True))
            what = e.difference.kind
            return (
                f"The {what} of {name} is wrong in slice {bad} along dim {dim} and right in slice {good}:"
                f" the {axis} ranks do not all do the same."
            )
    return None


def by_stage(e: Evidence) -> str | None:
    """Everything that is wrong is on some stages of the pipeline."""
    stages, last = sorted({e.piece(name).stage for name in e.wrong}), e.context.num_stages - 1
    if e.difference.kind == "loss" or last == 0 or not 0 < len(stages) <= last:
        return None
    if e.difference.kind == "weight":
        return f"Only weights of stage {_and(stages)} are wrong: the optimizer of these pp ranks does something else."
    if stages == list(range(stages[-1] + 1)):
        upto = f"up to stage {stages[-1]}" if stages[-1] else "of stage 0"
        return (
            f"Only gradients {upto} are wrong: what stage {stages[-1] + 1} hands back over pp is wrong,"
            " or belongs to another microbatch."
        )
    return (
        f"Only gradients of stage {_and(stages)} are wrong: that pp rank runs its backward on wrong activations,"
        " perhaps on those of another microbatch."
    )


def other_samples(e: Evidence) -> str | None:
    """Rows of an embedding get a gradient only from tokens that were seen: which rows have one tells who was seen."""
    for name in e.wrong if _is_about_gradients(e) else []:
        expected, got = e.reference.gradients[name], e.candidate.gradients[name]
        if expected.dim() < 2 or e.piece(name).role:  # which experts have rows depends on more than on samples
            continue
        wanted, seen = expected.flatten(1).any(1), got.flatten(1).any(1)
        if wanted.all() or torch.equal(wanted, seen):
            continue
        if e.difference.kind == "loss" or (seen & ~wanted).any():
            feeds = " or stage 0 of pp is fed a wrong microbatch" if e.context.num_stages > 1 else ""
            feeds += (
                ", or tokens and labels are cut unlike over cp, or forward does not use the positions that it is given"
                if e.context.layout.cp > 1
                else ""
            )
            return (
                f"{name} has gradients in other rows than those that this batch uses: samples are dealt wrongly{feeds}."
            )
        over = (
            f"the reduction over {' and '.join(e.data_axes())} is missing" if e.data_axes() else "samples were left out"
        )
        some = " or not every microbatch counts" if e.context.num_microbatches > 1 else ""
        return f"{name} lacks the gradients of some rows that samples of this batch use: {over}{some}."
    return None


# ---- when nothing fits: what is known for certain -------------------------------------------------------------------


def broken_backward(e: Evidence) -> str | None:
    """Gradients come from the end of the model to its start; where they turn wrong is where to look."""
    if e.difference.kind != "gradient":
        return None
    names = list(e.reference.gradients)
    start = (
        "The loss is right" if e.difference.step == 0 else f"Steps before {e.difference.step} and the loss are right"
    )
    if len(e.wrong) < len(names) and e.wrong == names[: len(e.wrong)]:
        return (
            f"{start}, and gradients are wrong from {e.wrong[-1]} back to {names[0]}: what flows back from"
            f" {names[len(e.wrong)]} is wrong{_over(e, 'tp', 'cp')}."
        )
    if len(e.wrong) < len(names):
        return f"{start}, {len(e.wrong)} of {len(names)} gradients are wrong, {e.wrong[0]} first: look at its backward."
    suspects = [f"the reduction over {axis}" for axis in e.data_axes()]
    suspects += ["the accumulation over microbatches"] if e.context.num_microbatches > 1 else []
    return f"{start}, but no gradient is: look at {_and(suspects, 'or') or 'the backward' + _over(e, 'tp', 'pp')}."


def broken_forward(e: Evidence) -> str | None:
    """The loss is wrong, so nothing after it can be right."""
    if e.difference.kind != "loss":
        return None
    hints = {
        "cp": "cp (which tokens and labels a rank has, the positions that the model is told, what attention gets from"
        " other ranks, the number of tokens that all divide by)",
        "ep": "ep (which expert lies where, rows on their way there and home, the router's weights in their sum)",
        "tp": "tp (the sum after a layer split by rows, or over the vocabulary)",
        "pp": "pp (the activations handed on, and microbatches paired with their targets)",
        **{
            axis: f"{axis} (which samples each rank gets, and the mean over them)"
            for axis in ("dp_replicate", "dp_shard")
        },
    }
    places = _and([words for axis, words in hints.items() if e.context.layout.degree(axis) > 1], "or")
    if e.difference.step:
        biased = next((name for name in e.of_role("router") if e.piece(name).has_bias), None)
        bias = (
            f" the bias of {biased.rpartition('.')[0]} is not updated from the loads of all ranks, or" if biased else ""
        )
        return (
            f"All before step {e.difference.step} is right and its loss is not:{bias} a stale copy of the weights is"
            f" used, or other samples; look at {places or 'what is kept from step to step'}."
        )
    return f"The forward is already wrong, before any gradient; look at {places or 'the initial weights and the data'}."


def broken_optimizer(e: Evidence) -> str:
    """All that is left: gradients are right and weights are not."""
    if e.difference.step:
        return (
            f"Step 0 is right and the weights of step {e.difference.step} are not, though its gradients are:"
            f" optimizer state or learning rate of {e.difference.tensor} is not carried over."
        )
    return (
        f"Every gradient is right, but {e.difference.tensor} is not after the update: look at clipping"
        " and at the optimizer's options for it (weight decay, learning rate)."
    )


RULES: tuple[Callable[[Evidence], str | None], ...] = (
    not_comparable,
    replicas_disagree,
    gradients_not_cleared,
    experts_not_in_place,
    experts_without_rows,
    all_zero,
    constant_factor,
    wrong_norm,
    unlike_biases,
    wrong_update,
    broken_attention,
    broken_router,
    broken_dispatch,
    fused_projection,
    only_what_tp_does_not_cut,
    slices_swapped,
    some_slices,
    by_stage,
    other_samples,
    broken_backward,
    broken_forward,
    broken_optimizer,
)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _sources(k: float, e: Evidence, names: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """The degrees, or if there is none the pairs of them, whose product is k or 1/k."""
    degrees, size = e.degrees(), max(k, 1 / k) if k > 0 else 0.0
    if e.context.layout.ep > 1 and e.all_experts(names) and math.isclose(size, e.context.layout.ep, rel_tol=e.loose):
        return [("ep",)]  # what is no expert is right, so it was not the others
    for count in (1, 2):
        found = [
            those
            for those in combinations(degrees, count)
            if "data" not in those or count == 1
            if math.isclose(math.prod(degrees[one] for one in those), size, rel_tol=10 * e.loose)
        ]
        if ("tp",) in found and names and not any(map(e.is_cut, names)) and any(map(e.is_cut, e.reference.gradients)):
            return [("tp",)]  # what tp cuts is right, so it was not the others
        if found:
            return found
    return []


def _scale_in_words(k: float, what: str, sources: Sequence[tuple[str, ...]]) -> str:
    size = (
        f"{max(k, 1 / k):.6g} times too {'large' if k > 1 else 'small'}"
        if k > 0
        else f"{k:.6g} times what it should be"
    )
    if not sources:
        return f"{what} {size}, and otherwise right: a scale is wrong, which is no degree of this plan."
    if sources == [("ep",)]:
        reason = "were probably not divided by" if k > 1 else "were probably divided once too often by"
        return f"{what} {size}: the gradients of experts {reason} ep={max(k, 1 / k):.6g}."
    over = _and((" and ".join(one) for one in sources), "or")
    reason = f"summed over {over} where the mean is wanted, or reduced over it twice"
    if k < 1:
        reason = f"divided once too often for {over}, or a part of it taken where the sum is wanted"
    return f"{what} {size}, which is {_and(map(_degree_in_words, sources))}: {reason}."


def _degree_in_words(those: tuple[str, ...]) -> str:
    return " x ".join("the number of microbatches" if one == MICROBATCHES else f"the degree of {one}" for one in those)


def _wrong_norms(e: Evidence) -> Iterator[tuple[str, float]]:
    """Norms that are often taken by mistake for the global one."""
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


def _is_about_gradients(e: Evidence) -> bool:
    return e.difference.kind in ("loss", "gradient")


def _over(e: Evidence, *axes: str) -> str:
    used = [axis for axis in axes if e.context.layout.degree(axis) > 1]
    return f", perhaps a sum over {' or '.join(used)} that is missing in the backward" if used else ""


def _inside(module: str, names: Sequence[str]) -> list[str]:
    return [name.removeprefix(f"{module}.").removesuffix(".weight") for name in names]


def _and(words: Iterable[object], conjunction: str = "and") -> str:
    *front, last = [str(word) for word in words] or [""]
    return f"{', '.join(front)} {conjunction} {last}" if front else last
