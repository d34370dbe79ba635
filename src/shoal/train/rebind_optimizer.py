"""Replace the parameters of an optimizer by the pieces that this rank holds of them."""

from __future__ import annotations

import warnings

import torch
from torch.optim import Adagrad, Optimizer

from shoal.errors import ShoalError
from shoal.parallel.parallel_model import ParallelModel


def rebind_optimizer(optimizer: Optimizer, composed: ParallelModel) -> None:
    """Let an optimizer hold the pieces of its parameters that this rank has."""
    groups = optimizer.param_groups
    is_replaced = any(piece is not p for group in groups for p in group["params"] for piece in composed.replacements(p))
    is_fresh = _is_fresh_adagrad(optimizer)
    if optimizer.state and is_replaced and not is_fresh:
        raise ShoalError(
            "this optimizer has made steps already, and its state is that of whole parameters, not of this plan's",
            fix="give prepare a fresh optimizer",
            code="T026",
        )
    for group in groups:
        group["params"] = [piece for p in group["params"] for piece in composed.replacements(p)]
    _reject_unknown_parameters(optimizer, composed)
    _reject_missing_stages(optimizer, composed)
    if is_fresh and is_replaced:
        _begin_adagrad(optimizer)


def _is_fresh_adagrad(optimizer: Optimizer) -> bool:
    """Adagrad has state before its first step."""
    return isinstance(optimizer, Adagrad) and not any(
        state["step"].is_meta or float(state["step"]) for state in optimizer.state.values()
    )


def _begin_adagrad(optimizer: Optimizer) -> None:
    """Give Adagrad the state of its start, as its constructor does, of the pieces."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for piece in group["params"]:
            total = torch.full_like(piece, group["initial_accumulator_value"])
            optimizer.state[piece] = {"step": torch.tensor(0.0), "sum": total}


def _reject_unknown_parameters(optimizer: Optimizer, composed: ParallelModel) -> None:
    """An optimizer of other parameters: no rank averages their gradients, and no checkpoint has them."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = set(composed.named.values())
    others = [parameter for parameter in held if parameter not in own]
    if held and len(others) == len(held):
        raise ShoalError(
            "not one parameter of the optimizer is of this model, which would never change",
            fix="build it over model.parameters() of the model that prepare is given, or over run.parameters",
            code="T027",
        )
    is_frozen = held and not any(parameter.requires_grad for parameter in held)
    if is_frozen and any(parameter.requires_grad for parameter in own):
        raise ShoalError(
            "every parameter of the optimizer is frozen, and the model has others that are trained: it would never"
            " change, as if the optimizer was built before shoal.lora",
            fix="build it after shoal.lora, over [p for p in model.parameters() if p.requires_grad]",
            code="T027",
        )
    what = f"{len(others)} of {len(held)} parameters of the optimizer are not of this model"
    fix = "make them parameters of the model that prepare is given"
    if others and composed.plan.layout.world_size > 1:
        raise ShoalError(f"{what}: no rank would average their gradients", fix=fix, code="T027")
    if others:
        warnings.warn(f"{what}: checkpoints of the run leave them out (fix: {fix})", stacklevel=4)


def _reject_missing_stages(optimizer: Optimizer, composed: ParallelModel) -> None:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    stages = [[p for p in part.model.parameters() if p.requires_grad] for part in composed.parts]
    counts = [sum(parameter in held for parameter in stage) for stage in stages]
    if any(counts) and any(stage and not count for stage, count in zip(stages, counts, strict=True)):
        raise ShoalError(
            "this rank has several stages, and the optimizer holds parameters of some of them only",
            fix="build it over run.parameters, or give prepare the optimizer of the whole model beside the model",
            code="T028",
        )
