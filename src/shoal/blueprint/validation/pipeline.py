"""Checks of pipelines, and of precisions and compilers that need blocks."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.description import BLOCKS_ESSAY
from shoal.errors import Problem, listed

BLOCKS_OF_PIPELINE = (
    "run.prepare(model, optimizer, loader) in one call, whose samples show the blocks;\n"
    "        or description = shoal.trace_blocks(model, inputs); model.describe = lambda: description;\n"
    f"        or {BLOCKS_ESSAY}"
)
SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")
"""Schedules that compute the gradients of activations first, and those of weights later."""


def check_pipeline(plan: Plan, description: Description) -> Iterator[Problem]:
    """Problems of the stages: too few blocks, or a schedule that excludes recompute."""
    pp, v, num_blocks = plan.layout.pp, plan.v or 1, len(description.blocks)
    if pp == 1:
        return
    if not num_blocks:
        yield Problem(
            "P041", f"pp={pp} cuts the model between blocks, but the model describes none", BLOCKS_OF_PIPELINE
        )
        return
    if pp * v > num_blocks:
        what = f"pp={pp} x v={v} = {pp * v} stages" if v > 1 else f"pp={pp} stages"
        fixes = [f"pp={listed(range(1, num_blocks // v + 1))}"] if v <= num_blocks else []
        fixes += ["v=1 with 1f1b or gpipe"] if v > 1 and pp <= num_blocks else []
        fixes = fixes or ["pp=1 with v=1"]
        yield Problem(
            "P042",
            f"{what} are more than the {num_blocks} block{'s' * (num_blocks != 1)} of the model",
            ", or ".join([*fixes, f"--model.num_layers {pp * v}"]),
        )
    if plan.recompute != "none" and plan.schedule in SPLIT_BACKWARD:
        yield Problem(
            "P043",
            f"{plan.schedule} splits each backward in two; torch would then recompute a block once for every parameter",
            "recompute=none, or 1f1b, interleaved, looped or gpipe",
        )


def check_precision(plan: Plan, description: Description) -> Iterator[Problem]:
    """Problems of fp8, which replaces whole linear layers inside blocks."""
    if plan.precision != "fp8":
        return
    if plan.layout.tp > 1:
        yield Problem(
            "P044",
            f"fp8 needs whole linear layers, but tp={plan.layout.tp} splits them",
            "bf16 instead of fp8, or tp=1",
        )
    if not description.blocks:
        yield Problem("P041", "fp8 needs blocks, but the model describes none", BLOCKS_ESSAY)


def check_compile(plan: Plan, description: Description) -> Iterator[Problem]:
    """Problems of torch.compile with schedules and recompute."""
    if plan.schedule in SPLIT_BACKWARD:
        yield Problem(
            "P045",
            f"{plan.schedule} splits each backward in two, but a compiled block computes all of it each time",
            "--run.compile false, or 1f1b, interleaved, looped or gpipe",
        )
    if plan.recompute != "none" and plan.layout.pp > 1 and description.num_experts:
        yield Problem(
            "P046",
            f"torch.compile cannot capture recompute={plan.recompute} of blocks with experts in a pipeline, since each"
            " router needs the auxiliary loss of its own microbatch again",
            "--run.compile false, or recompute=none, or pp=1",
        )
