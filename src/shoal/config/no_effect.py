"""Settings of how replicas meet that nothing would come of under a plan. They are refused: who typed them expects that
something does.

What is left to be chosen (`sync=auto`, `comm.algorithm: auto`, `plan: auto`) is not judged by what was chosen; and one
rank alone may have settings for several: the same recipe runs there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.blueprint.local_sgd import reject_fragments
from shoal.blueprint.plan import Plan
from shoal.config.recipe import CommSection, Recipe
from shoal.errors import Problem

OUTER = ("outer_lr", "outer_momentum")
ISLANDS = (*OUTER, "fragments", "outer_delay", "rescale")


def no_effect(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """Settings of `comm:` that have no effect under this plan, resolved."""
    comm, synchrony = recipe.comm, plan.synchrony
    islands = [name for name in ISLANDS if _is_said(comm, name)]
    if plan.sync is None and islands:
        yield Problem(
            f"{_spelled(comm, islands)} about islands, and the plan has no sync=", _without(islands, "sync=diloco:50")
        )
    outer = [name for name in OUTER if name in islands]
    if synchrony is not None and synchrony.way == "local" and outer:
        what = f"{_spelled(comm, outer)} about sync=diloco; sync={synchrony} takes the mean"
        yield Problem(what, _without(outer, f"sync=diloco:{synchrony.every}"))
    if synchrony is not None and synchrony.way == "diloco" and _is_said(comm, "rescale"):
        what = f"{_spelled(comm, ['rescale'])} about sync=local; sync={synchrony} has an optimizer of its own"
        yield Problem(what, _without(["rescale"], f"sync=local:{synchrony.every}"))
    if comm.warmup_steps is not None and not plan.sync and not plan.compress:
        what = f"comm.warmup_steps {comm.warmup_steps} is about compress= and sync=, and the plan has neither"
        yield Problem(what, "leave comm.warmup_steps out, or compress=int8 in the plan")
    yield from _carries_nothing(recipe, plan)


def _carries_nothing(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """A list of messages between replicas of which there is one, on several ranks."""
    algorithm, layout = recipe.comm.algorithm, plan.layout
    axis = "dp_replicate" if plan.is_sharded or plan.sync else plan.gradient_axis
    is_open = algorithm in ("builtin", "auto") or recipe.run.planned
    if not is_open and layout.world_size > 1 and layout.degree(axis) == 1:
        what = f"comm.algorithm {algorithm} is about what replicas send each other, and dp_replicate=1: there is one"
        yield Problem(what, "dp_replicate=2 or more in the plan, or --comm.algorithm builtin")


def without_no_effect(comm: CommSection, plan: Plan) -> CommSection:
    """The settings with those that a plan which was chosen does not use as if nobody had said them: what is kept of the
    run can be run again."""
    return comm.model_copy(update={name: _usual(name) for name in _unused(comm, plan)})


def _unused(comm: CommSection, plan: Plan) -> Iterator[str]:
    synchrony = plan.synchrony
    if synchrony is None:
        yield from ISLANDS
        if not plan.compress:
            yield "warmup_steps"
    else:
        yield from OUTER if synchrony.way == "local" else ["rescale"]
        if reject_fragments(comm.fragments, comm.outer_delay, synchrony.every) is not None:
            yield from ("fragments", "outer_delay")


def _usual(name: str) -> object:
    return CommSection.model_fields[name].default


def _is_said(comm: CommSection, name: str) -> bool:
    """Whether it differs from what it is by itself: a recipe that a run has kept spells everything out."""
    return bool(getattr(comm, name) != _usual(name))


def _spelled(comm: CommSection, names: Sequence[str]) -> str:
    words = [f"comm.{name} {getattr(comm, name)}" for name in names]
    return " and ".join(words) + (" is" if len(words) == 1 else " are")


def _without(names: Sequence[str], instead: str) -> str:
    return f"{instead} in the plan, or {' '.join(f'--comm.{name} {_usual(name)}' for name in names)}"
