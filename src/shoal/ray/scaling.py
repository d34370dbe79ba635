"""The plan of a recipe for the number of workers that Ray has started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.config.recipe import Recipe
from shoal.elastic.replan import plan_for_ranks
from shoal.errors import Problem, ShoalError, listed


def with_plan_for(recipe: Recipe, num_workers: int, per_node: int) -> Recipe:
    """The recipe with a plan for this many workers, `per_node` on each machine.

    `plan: auto` is planned again. The replicas and shards of an explicit plan become more or fewer; the split of the
    model and the global batch stay.
    """
    if recipe.run.planned:
        from shoal.train.recipe.auto_plan import with_best_plan  # the planner, which few runs need

        return with_best_plan(recipe, num_workers, per_node)[0]
    plan = plan_for_ranks(recipe.plan, num_workers, recipe.data.global_batch)
    return recipe.model_copy(update={"plan": plan})


def check_sizes(recipe: Recipe, sizes: Iterable[int]) -> Iterator[Problem]:
    """Find numbers of workers that an explicit plan cannot use. Those of `plan: auto` need the model."""
    if recipe.run.planned:
        return
    sizes = list(sizes)
    unfit = [size for size in sizes if not _fits(recipe, size)]
    if unfit:
        fit = [size for size in sizes if size not in unfit]
        fix = f"ScalingConfig(num_workers={fit[-1]})" if fit else "another plan or --data.global_batch"
        what = (
            f"the plan {recipe.plan.brief()} with batch {recipe.data.global_batch} cannot use {listed(unfit)} workers"
        )
        yield Problem("Y004", f"{what}, which ScalingConfig allows", f"{fix}; or --plan auto")


def _fits(recipe: Recipe, size: int) -> bool:
    try:
        plan_for_ranks(recipe.plan, size, recipe.data.global_batch)
    except ShoalError:
        return False
    return True
