"""Every problem of a recipe's settings that neither the model nor the data is needed for.

Each area has one function here or below: the plan and the batch in `shoal.blueprint.validation`, `comm:` in
`no_effect`, durations, packages and optimizers in files of their own, the rest of `optim:` and fp8 in this file.
Nothing here needs torch, so a mistyped key is reported in a fraction of a second. `shoal.train.recipe.preflight` adds
the model and the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.sync_words import check_fragments
from shoal.blueprint.validation.bf16_weights import check_bf16_weights
from shoal.blueprint.validation.check import check_ranks
from shoal.config.checks.durations import check_durations
from shoal.config.checks.no_effect import no_effect
from shoal.config.checks.optimizers import check_whole_tensors
from shoal.config.checks.packages import check_packages
from shoal.config.checks.packed_base import check_packed_base
from shoal.config.recipe import Recipe, RunSection
from shoal.errors import Problem

KEPT_BY_THE_PLANNER = ("recompute", "precision", "compress", "sync")
"""Words of a plan that do not depend on the degrees, which the planner chooses."""


def check_settings(
    recipe: Recipe, world_size: int, *, tries_other_syncs: bool = False, has_to_change: bool = False
) -> list[Problem]:
    """All problems of the plan, the batch, `comm:`, `optim:`, fp8, durations and packages on this many ranks.

    `tries_other_syncs`: the caller will also try other `sync` and `compress` values, which `comm.*` may be set for.
    `has_to_change`: other checks have rejected the plan, so that its layout will be another.
    """
    return [
        *check_ranks(recipe.plan, world_size, batch=recipe.data.global_batch, has_to_change=has_to_change),
        *(() if tries_other_syncs else check_comm(recipe, world_size)),
        *check_fragments_of(recipe),
        *check_optimizer(recipe),
        *check_whole_tensors(recipe, recipe.plan.fill(world_size).with_layout()),
        *check_fp8(recipe),
        *check_packed_base(recipe),
        *check_packages(recipe),
        *check_durations(recipe),
        *check_replay(recipe, recipe.plan.fill(world_size).with_layout()),
        *check_loss_mean(recipe.optim.loss_mean, recipe.plan),
    ]


def check_incomplete(recipe: Recipe, num_ranks: int | None, *, tries_other_syncs: bool = False) -> list[Problem]:
    """Check a recipe of which some values could not be read; defaults stand for these.

    `num_ranks` None: it is not known before torch is loaded. Then it is the product of the plan's degrees.
    """
    plan = recipe.plan
    if recipe.run.planned:  # the planner would choose the degrees
        kept = {key: value for key, value in plan.to_mapping().items() if key in KEPT_BY_THE_PLANNER}
        recipe, num_ranks = recipe.model_copy(update={"plan": Plan.of(kept)}), 1
    if num_ranks is None:
        num_ranks = math.prod(degree or 1 for degree in (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp))
    return check_settings(recipe, num_ranks, tries_other_syncs=tries_other_syncs)


def check_comm(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Find `comm:` settings that have no effect under the plan."""
    plan = recipe.plan.fill(world_size).with_layout()
    return no_effect(recipe, plan, knows_replicas=plan.layout.world_size == world_size)


def check_fragments_of(recipe: Recipe) -> Iterator[Problem]:
    """Find fragments and delays that do not fit between two synchronizations."""
    comm, sync = recipe.comm, recipe.plan.sync_spec
    if sync is not None:
        yield from check_fragments(comm.fragments, comm.outer_delay, sync.every)


def check_optimizer(recipe: Recipe) -> Iterator[Problem]:
    """Find bf16 settings that the optimizer would ignore, or that the plan does not support."""
    optim = recipe.optim
    has_own_kernel = optim.name == "adamw" and optim.implementation == "auto"
    other = optim.name if optim.name != "adamw" else f"optim.implementation {optim.implementation}"
    for key in ("state_dtype", "param_dtype"):
        if getattr(optim, key) == "bf16" and not has_own_kernel:
            what = f"optim.{key} bf16 is for adamw with its own kernel, not for {other}"
            yield Problem("R024", what, f"--optim.{key} fp32, or --optim.name adamw --optim.implementation auto")
    if optim.state_dtype == "bf16" and recipe.plan.precision == "fp64":
        what = "optim.state_dtype must be fp32 under the precision fp64, got bf16"
        yield Problem("R025", what, "--optim.state_dtype fp32, or another --plan.precision")
    if optim.param_dtype == "bf16":
        yield from check_bf16_weights(recipe.plan)
    if recipe.run.ema is not None and recipe.plan.sync:
        yield no_common_average(recipe.plan)


def check_fp8(recipe: Recipe) -> Iterator[Problem]:
    """Find `run.fp8*` under another precision. `run.fp8` alone reads as if it turned fp8 on, and it does not."""
    run, precision = recipe.run, recipe.plan.precision
    defaults = {name: RunSection.model_fields[name].default for name in ("fp8", "fp8_min_features", "fp8_head")}
    changed = [name for name in defaults if getattr(run, name) != defaults[name]]
    if precision != "fp8" and changed:
        names = " and ".join(f"run.{name} {getattr(run, name)}" for name in changed)
        what = f"{names} {'needs' if len(changed) == 1 else 'need'} the precision fp8, got {precision}"
        back = " ".join(f"--run.{name} {'null' if defaults[name] is None else defaults[name]}" for name in changed)
        yield Problem("R026", what, f"--plan.precision fp8, or {back}")


def check_replay(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """Find `run.check_compute` under a plan whose ranks do not compute alone."""
    is_alone = plan.layout.dp_replicate == plan.layout.world_size and not (plan.zero or plan.sync or plan.compress)
    is_plain = is_alone and recipe.comm.algorithm in ("builtin", "auto") and not recipe.run.sync_batch_norm
    if recipe.run.check_compute.amount and not is_plain:
        yield Problem(
            "T079",
            f"check_compute needs ranks that compute alone and hold the whole model, and the plan is {plan.brief()}",
            "--run.check_compute 0step; --run.check_replicas 100step compares copies under every plan",
        )


def check_loss_mean(loss_mean: str, plan: Plan) -> Iterator[Problem]:
    """Find means of microbatches where a rank has only a part of the tokens that one of them is over."""
    if loss_mean == "microbatch" and (plan.cp or 1) > 1:
        what = f"loss_mean microbatch averages means over whole sequences, and cp={plan.cp} divides them"
        yield Problem("E017", what, "--optim.loss_mean global, or --plan.cp 1")


def no_common_average(plan: Plan) -> Problem:
    """The problem of an average under a plan with `sync=`."""
    return Problem(
        "T053",
        f"sync={plan.sync} leaves each replica weights of its own between two exchanges, whose averages differ",
        "a plan without sync=, or no EMA",
    )
