"""Reject `comm.*` settings that have no effect under the plan.

Values that a run chooses itself (`sync=auto`, `comm.algorithm: auto`, `plan: auto`) are not checked against the choice.
One rank alone accepts settings for several, so that the same recipe runs there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.sync_words import check_fragments
from shoal.config.recipe import CommSection, Recipe
from shoal.errors import Problem

OUTER = ("outer_lr", "outer_momentum")
LOCAL_SGD = (*OUTER, "fragments", "outer_delay", "rescale")


def no_effect(recipe: Recipe, plan: Plan, *, knows_replicas: bool = True) -> Iterator[Problem]:
    """Problems of `comm:` settings that have no effect under this resolved plan.

    `knows_replicas` False: the degrees of the plan do not fit the ranks, and the number of replicas is not known.
    """
    comm, sync = recipe.comm, plan.sync_spec
    changed = [name for name in LOCAL_SGD if _is_changed(comm, name)]
    if plan.sync is None and changed:
        yield Problem("R022", f"{_spelled(comm, changed)} no effect without sync=", _without(changed, "sync=diloco:50"))
    outer = [name for name in OUTER if name in changed]
    if sync is not None and sync.way == "local" and outer:
        what = f"{_spelled(comm, outer)} no effect under sync={sync}, which takes the mean"
        yield Problem("R022", what, _without(outer, f"sync=diloco:{sync.every}"))
    if sync is not None and sync.way == "diloco" and _is_changed(comm, "rescale"):
        what = f"{_spelled(comm, ['rescale'])} no effect under sync={sync}, which has an outer optimizer"
        yield Problem("R022", what, _without(["rescale"], f"sync=local:{sync.every}"))
    if comm.warmup_steps is not None and not plan.sync and not plan.compress:
        what = f"comm.warmup_steps {comm.warmup_steps} has no effect without compress= or sync="
        yield Problem("R022", what, "compress=int8 in the plan, or --comm.warmup_steps None")
    if knows_replicas:
        yield from _check_algorithm(recipe, plan)


def _check_algorithm(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """The problem of an algorithm between replicas where several ranks hold the only replica."""
    algorithm, layout = recipe.comm.algorithm, plan.layout
    axis = "dp_replicate" if plan.is_sharded or plan.sync else plan.gradient_axis
    is_open = algorithm in ("builtin", "auto") or recipe.run.planned
    if not is_open and layout.world_size > 1 and layout.degree(axis) == 1:
        what = f"comm.algorithm {algorithm} has no effect with one replica, and the plan has dp_replicate=1"
        yield Problem("R023", what, "dp_replicate=2 or more in the plan, or --comm.algorithm builtin")


def without_no_effect(comm: CommSection, plan: Plan) -> CommSection:
    """Reset the settings that a chosen plan does not use to their defaults, so that the stored recipe is valid."""
    return comm.model_copy(update={name: _default(name) for name in _unused(comm, plan)})


def _unused(comm: CommSection, plan: Plan) -> Iterator[str]:
    sync = plan.sync_spec
    if sync is None:
        yield from LOCAL_SGD
        if not plan.compress:
            yield "warmup_steps"
    else:
        yield from OUTER if sync.way == "local" else ["rescale"]
        if any(check_fragments(comm.fragments, comm.outer_delay, sync.every)):
            yield from ("fragments", "outer_delay")


def _default(name: str) -> object:
    return CommSection.model_fields[name].default


def _is_changed(comm: CommSection, name: str) -> bool:
    """Whether it differs from its default. A stored recipe spells out all values, so being set is no sign."""
    return bool(getattr(comm, name) != _default(name))


def _spelled(comm: CommSection, names: Sequence[str]) -> str:
    words = [f"comm.{name} {getattr(comm, name)}" for name in names]
    return " and ".join(words) + (" has" if len(words) == 1 else " have")


def _without(names: Sequence[str], instead: str) -> str:
    return f"{instead} in the plan, or {' '.join(f'--comm.{name} {_default(name)}' for name in names)}"
