"""Causes by location: which slices, stages or rows of the tensors are wrong."""

from __future__ import annotations

import torch

from shoal.verification.compare import relative_difference
from shoal.verification.diagnosis.evidence import Evidence, find_slice, slices
from shoal.verification.diagnosis.wording import joined


def only_what_tp_does_not_cut(e: Evidence) -> str | None:
    """Tensors that tp replicates are wrong, and those that it cuts are right."""
    cut = [name for name in e.reference.gradients if e.is_cut(name)]
    if e.difference.kind != "gradient" or e.context.layout.tp == 1 or not cut or any(map(e.is_cut, e.wrong)):
        return None
    scope = "exactly the" if len(e.wrong) == len(e.reference.gradients) - len(cut) else "among the"
    return (
        f"{e.named(e.wrong)} wrong, {scope} tensors that tp does not cut, while those it cuts are right:"
        " partial gradients are not summed over tp."
    )


def slices_swapped(e: Evidence) -> str | None:
    """Every slice exists, but in another position."""
    for name, axis, dim, expected, got in slices(e):
        order = [find_slice(piece, expected, e.loose) for piece in got]
        if None not in order and len(set(order)) == len(order) and order != list(range(len(order))):
            seen = ", ".join(str(index) for index in order)
            return f"{name} has its slices along dim {dim} in the order {seen}: {axis} ranks hold each other's shard."
    return None


def some_slices(e: Evidence) -> str | None:
    """The shards of some ranks are right, and those of others are wrong."""
    for name, axis, dim, expected, got in slices(e):
        pairs = enumerate(zip(expected, got, strict=True))
        right = {
            i: relative_difference(a, b) <= e.loose for i, (a, b) in pairs if a.any()
        }  # slices of zeros are no evidence
        if any(right.values()) and not all(right.values()):
            bad, good = (", ".join(str(i) for i, ok in right.items() if ok is is_right) for is_right in (False, True))
            what = e.difference.kind
            return (
                f"The {what} of {name} is wrong in slice {bad} along dim {dim} and right in slice {good}:"
                f" the {axis} ranks do not all compute the same."
            )
    return None


def by_stage(e: Evidence) -> str | None:
    """All wrong tensors are on some stages of the pipeline."""
    stages, last = sorted({e.piece(name).stage for name in e.wrong}), e.context.num_stages - 1
    if e.difference.kind == "loss" or last == 0 or not 0 < len(stages) <= last:
        return None
    if e.difference.kind == "weight":
        return f"Only weights of stage {joined(stages)} are wrong: the optimizer of these pp ranks differs."
    if stages == list(range(stages[-1] + 1)):
        upto = f"up to stage {stages[-1]}" if stages[-1] else "of stage 0"
        return (
            f"Only gradients {upto} are wrong: the gradient that stage {stages[-1] + 1} sends back over pp is wrong,"
            " or belongs to another microbatch."
        )
    return (
        f"Only gradients of stage {joined(stages)} are wrong: that pp rank runs its backward on wrong activations,"
        " perhaps on those of another microbatch."
    )


def other_samples(e: Evidence) -> str | None:
    """Rows of an embedding have a gradient only for tokens of the batch, so the rows show which tokens were used."""
    for name in e.wrong if e.is_about_gradients else []:
        expected, got = e.reference.gradients[name], e.candidate.gradients[name]
        if expected.dim() < 2 or e.piece(name).role:  # rows of experts do not depend on samples alone
            continue
        used, seen = expected.flatten(1).any(1), got.flatten(1).any(1)
        if used.all() or torch.equal(used, seen):
            continue
        if e.difference.kind == "loss" or (seen & ~used).any():
            feeds = " or stage 0 of pp gets a wrong microbatch" if e.context.num_stages > 1 else ""
            feeds += (
                ", or tokens and labels are cut differently over cp, or forward ignores its positions"
                if e.context.layout.cp > 1
                else ""
            )
            rows = f"{name} has gradients in other rows than those that this batch uses"
            return f"{rows}: samples are distributed wrongly{feeds}."
        over = (
            f"the reduction over {' and '.join(e.data_axes())} is missing" if e.data_axes() else "samples are missing"
        )
        some = " or a microbatch is not accumulated" if e.context.num_microbatches > 1 else ""
        return f"{name} lacks the gradients of some rows that samples of this batch use: {over}{some}."
    return None
