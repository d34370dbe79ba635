"""What a script does with a `Run` that cannot be right: each is refused, with the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.data.batch import length
from shoal.data.deal import DealtLoader
from shoal.errors import ShoalError
from shoal.parallel.composed import Composed
from shoal.train.build import describe
from shoal.train.step import OpenStep

# ---- what is prepared ------------------------------------------------------------------------------------------------


def refuse_second(kind: str, first: object) -> None:
    """A second model, or a second optimizer."""
    if first is not None:
        raise ShoalError(
            f"this run has a {kind} already, and a run has one: it clips, scales and synchronises that one only",
            fix=f"one Run for each {kind}, sharing the ranks: Run(..., world=run.world); or one nn.Module around both",
        )


def refuse_compiled(model: nn.Module) -> None:
    """Of what torch.compile returns, modules have other names than the model itself describes."""
    if hasattr(model, "_orig_mod") and describe(model).blocks:
        raise ShoalError(
            "this model was given to torch.compile before, as a whole, and its blocks cannot be found in it",
            fix="give prepare the model itself, and let the run compile its blocks: Run(compile=True)",
        )


def refuse_rounding(optimizer: Optimizer, weight_dtype: torch.dtype) -> None:
    """Weights in bf16 lose most of what is added to them, unless it is rounded at random."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    if weight_dtype == torch.bfloat16 and is_torchs:
        raise ShoalError(
            f"torch's {type(optimizer).__name__} rounds weights in bf16 to the nearest, and most updates are lost",
            fix="shoal.AdamW(model.parameters(), lr=...), which rounds at random; or weights='fp32'",
        )


# ---- one step --------------------------------------------------------------------------------------------------------


def refuse_own_loop(composed: Composed) -> None:
    """Forwards and backwards of a script's own, where there is no order to make them in."""
    if composed.pipeline is not None:
        raise ShoalError(
            "a pipeline runs the forwards and backwards of all microbatches in an order of its own",
            fix="run.step(batch), with loss= given to the Run",
        )


def refuse_unknown_batch(composed: Composed) -> None:
    """A backward out of nowhere, where it has to be known whose tokens these are, and of how many sequences."""
    for what, is_used in (
        ("a model with routers of experts", composed.balance is not None),
        (f"cp={composed.mesh.degree('cp')}", composed.context is not None),
    ):
        if is_used:
            raise ShoalError(
                f"with {what}, a backward has to know the batch that it belongs to",
                fix="for batch in run.batches(loader): ..., or run.step(batch)",
            )


def refuse_direct_loop(loaders: Iterable[DealtLoader]) -> None:
    """Ranks that share a batch, each of which goes through its loader by itself."""
    if any(loader.is_iterated_directly for loader in loaders):
        raise ShoalError(
            "this loop takes batches from the loader itself; where the last batch has fewer samples than there"
            " are ranks, some ranks would take a step less and the others wait for ever",
            fix="for batch in run.batches(loader): ...",
        )


def refuse_batch(batch: Any, before: OpenStep | None) -> None:
    """One that comes too soon, or has nothing in it."""
    if before is not None and before.has_begun:
        raise ShoalError(
            "the batch before this one was not finished: backward without update()",
            fix="run.update() after each batch; to accumulate, say mb= in the plan and loop over run.microbatches",
        )
    if not length(batch):
        raise ShoalError(
            "this batch has no samples", fix="samples for every rank: for batch in run.batches(loader): ..."
        )


def refuse_open(step: OpenStep | None, why: str) -> None:
    """Whatever must not come between a batch that was taken and its update."""
    if step is not None:
        raise ShoalError(
            f"{why} in the middle of a step would lose its samples, and the gradients that it has summed up",
            fix="run.step(batch), or run.update(), first",
        )


def with_all_backwards(step: OpenStep | None) -> OpenStep:
    """The step, whose backwards were all made; an update that comes before is refused."""
    if step is None or not step.has_begun:
        raise ShoalError("update() without a backward", fix="call run.backward(loss) first, or run.step(batch)")
    if step.index >= 0 and len(step.sums) < len(step.microbatches):
        raise ShoalError(
            f"{len(step.sums)} of {len(step.microbatches)} microbatches had a backward, and gradients are"
            " synchronised in that of the last",
            fix="for microbatch in run.microbatches(batch): ... run.backward(loss), to its end, then run.update()",
        )
    return step
