"""Reject optimizers that a run cannot use, each with the fix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import SGD, Adagrad, Optimizer, Rprop

from shoal.blueprint.plan import Plan
from shoal.config.checks.optimizers import cut_by
from shoal.errors import Problem
from shoal.numerics.optim.elementwise import is_elementwise, joins_shards
from shoal.numerics.optim.lion import Lion


def check_rounding(optimizer: Optimizer, weight_dtype: torch.dtype) -> Iterator[Problem]:
    """Weights in bf16 lose most of what is added to them, unless it is rounded at random."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    if weight_dtype == torch.bfloat16 and (is_torchs or isinstance(optimizer, Lion) or joins_shards(optimizer)):
        owner = "torch" if is_torchs else "shoal"
        yield Problem(
            "T003",
            f"{owner}'s {type(optimizer).__name__} rounds weights in bf16 to the nearest, and most updates are lost",
            "shoal.AdamW(model.parameters(), lr=...), which rounds at random; or param_dtype='fp32'",
        )


def check_shards(optimizer: Optimizer, plan: Plan, *, is_copied: bool) -> Iterator[Problem]:
    """What torch rejects for shards in the middle of a step: Rprop writes into a selection of elements, and the fused
    kernels of SGD and Adagrad do not know them. `is_copied`: the optimizer will hold plain copies in host memory."""
    if isinstance(optimizer, Rprop) and plan.is_sharded:
        what = f"Rprop selects elements of tensors, which torch cannot do with the shards of zero={plan.zero}"
        yield Problem("T103", what, "zero=0 in the plan; or torch.optim.RMSprop")
    has_shards = plan.is_sharded and not is_copied
    if isinstance(optimizer, SGD | Adagrad) and has_shards and any(group["fused"] for group in optimizer.param_groups):
        what = f"torch's fused kernel of {type(optimizer).__name__} does not know the shards of zero={plan.zero}"
        yield Problem("T103", what, "fused=False, in a recipe --optim.implementation foreach")


def check_whole(optimizer: Optimizer, plan: Plan) -> Iterator[Problem]:
    """An optimizer that reads whole tensors, under a plan that cuts them."""
    knows_shards = joins_shards(optimizer)
    cut = cut_by(plan, joins_shards=knows_shards)
    if cut is None or is_elementwise(optimizer):
        return
    right = "zero, dp_replicate, pp and cp are right" if knows_shards else "dp_replicate, pp and cp leave them whole"
    others = "" if knows_shards else "shoal.Muon, shoal.LAMB or shoal.LARS, which know zero; or "
    yield Problem(
        "T051",
        f"{type(optimizer).__name__} reads whole tensors, and {cut} leaves each rank a piece of them",
        f"{'' if knows_shards else 'zero=0 '}tp=1 ep=1 offload=none in the plan ({right}); or {others}shoal.AdamW,"
        " shoal.Lion or torch.optim.SGD",
    )
