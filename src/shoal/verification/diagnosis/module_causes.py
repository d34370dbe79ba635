"""Causes in attention, routers, experts and fused projections, by which of their tensors are wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from shoal.verification.diagnosis.evidence import Evidence, by_expert, nearest_slices
from shoal.verification.diagnosis.wording import joined

_FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|kv_proj|gate_up|up_gate", re.IGNORECASE)


def experts_not_in_place(e: Evidence) -> str | None:
    """Experts are in another order. An update is smaller than the distance of two experts, so their initial values
    identify them."""
    for name in e.of_role("expert"):
        now, initial = (by_expert(e, name, tensors) for tensors in (e.candidates[0].weights, e.context.initial))
        order = nearest_slices(now, initial) if now and initial else []
        if order != list(range(len(order))):
            ranks = ": ranks along ep hold each other's experts" if e.context.layout.ep > 1 else ""
            listed = ", ".join(map(str, order))
            return f"The experts of {e.piece(name).module} are in the order {listed}, as seen in {name}{ranks}."
    return None


def experts_without_rows(e: Evidence) -> str | None:
    """An expert has no gradient in any of its weights, although tokens of this batch chose it."""
    ep = e.context.layout.ep
    for module in dict.fromkeys(e.piece(name).module for name in e.of_role("expert")) if e.is_about_gradients else ():
        learns = [_learns(e, module, tensors) for tensors in e.tensors]
        idle = [index for index, (expected, got) in enumerate(zip(*learns, strict=False)) if expected and not got]
        if idle and any(learns[1]):
            ranks = sorted({index * ep // len(learns[1]) for index in idle})
            where, over = (f" (of ep rank {joined(ranks)})", " over ep") if ep > 1 else ("", "")
            return (
                f"Expert {joined(idle)} of {module}{where} gets no gradient, though tokens of this batch chose it: its"
                f" rows are probably lost in the dispatch{over}."
            )
    return None


def _learns(e: Evidence, module: str, gradients: Mapping[str, Tensor]) -> list[bool]:
    """Whether each expert has a gradient in any of its weights."""
    pieces = [by_expert(e, name, gradients) for name in e.of_role("expert", module)]
    return [any(bool(piece.any()) for piece in expert) for expert in zip(*pieces, strict=False)]


def broken_attention(e: Evidence) -> str | None:
    """Gradients after an attention are right, and those before it are not."""
    names = [name for name in e.wrong if e.piece(name).role == "attention"]
    if e.difference.kind != "gradient" or e.context.layout.cp == 1 or not names:
        return None
    module = e.piece(names[-1]).module
    mine = e.of_role("attention", module)
    bad, good = ([name for name in mine if (name in e.wrong) is is_wrong] for is_wrong in (True, False))
    if not good or len(e.wrong) == len(bad):  # also wrong after it; or right before it
        return None
    return (
        f"The loss is right, and in {module} the gradient of {joined(_inside(module, good))} is right but that of"
        f" {joined(_inside(module, bad))} is not: probably the backward of attention over cp (the gradients of"
        " queries, keys and values from other ranks have to be returned and summed)."
    )


def broken_router(e: Evidence) -> str | None:
    """The gradient of a router is wrong, and those of its experts are right."""
    names = [name for name in e.wrong if e.piece(name).role == "router"]
    if e.difference.kind != "gradient" or not names:
        return None
    experts = e.of_role("expert", e.piece(names[-1]).module)
    if not experts or any(name in e.wrong for name in experts):
        return None
    if len(names) == len(e.wrong):
        axes = joined(e.data_axes() + ["tp"] * (e.context.layout.tp > 1), "or")
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
    """The biases of routers, which depend on the loads alone, differ first."""
    if e.difference.kind != "weight" or not e.wrong or not all(name.endswith("router.bias") for name in e.wrong):
        return None
    return (
        f"{e.named(e.wrong)} wrong and all else of the step is right: probably the loads that update the biases are"
        " not those of the global batch, summed over all ranks and microbatches."
    )


def broken_dispatch(e: Evidence) -> str | None:
    """Gradients of routers and experts are right, and those before them are wrong."""
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
        " that are returned over ep."
    )


def fused_projection(e: Evidence) -> str | None:
    """Queries, keys and values come from one matrix, and tp cuts it into rows that mix them up."""
    if e.difference.kind != "loss" or e.difference.step or e.context.layout.tp == 1:
        return None
    for name, gradient in e.reference.gradients.items():
        is_cut = e.piece(name).tp_dim == 0 and gradient.dim() == 2
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if is_cut and (_FUSED.search(layer) or gradient.shape[0] == 3 * gradient.shape[1]):
            return (
                f"The forward is wrong, and tp cuts {name}, of shape {tuple(gradient.shape)}, into blocks of rows:"
                " if it holds queries, keys and values one after the other (or gate and up), a tp rank gets rows of one"
                " of them in place of all. Use one layer for each, or store the rows of one head side by side:"
                " unflatten(-1, (heads, 3, head_dim))."
            )
    return None


def _inside(module: str, names: Sequence[str]) -> list[str]:
    return [name.removeprefix(f"{module}.").removesuffix(".weight") for name in names]
