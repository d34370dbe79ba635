"""Say which cause of memory grew over its prediction when a rank ran out of it, and which plan would fit."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.recipe import Recipe
from shoal.errors import Problem, RunFailed, ShoalError
from shoal.planner.changes.nearest import Excess, beside_states, nearest_fitting
from shoal.planner.task import SPARE, Task
from shoal.predict.cluster import GIB
from shoal.predict.estimate.peak_memory import PeakMemory
from shoal.train.recipe.auto_plan import model_of
from shoal.train.recipe.predict_step import task_for

STATES = ("parameters", "gradients", "optimizer")
OTHER = "activations, buffers, other"
OUTSIDE = "outside of tensors"
NOTED = 0.1
"""A cause that grew by less of the predicted total is not named. An assumption."""
LIKELY = 3.0
"""Up to this many times the prediction, the prediction of activations was wrong; beyond, the model holds something
else, which no plan divides. An assumption."""


def explained(recipe: Recipe, error: RunFailed, *, per_node: int | None = None) -> RunFailed:
    """The error of a rank that had no memory left, with a table of its memory by cause and a plan that would fit.

    The plan of the recipe is resolved. `per_node`: the ranks of each host; None: all are on one.
    """
    measured, (first, *more) = error.memory, error.problems
    if not measured.get("total"):
        return error
    try:
        task = task_for(recipe, model_of(recipe), per_node=per_node)
        memory = task.memory(recipe.plan)
        excess = _excess(memory, measured)
        fix = _fitting(task, recipe, measured, excess) or _nothing_fits(task, memory, measured, excess)
        lines = [*_table(memory, measured), f"  {_verdict(memory, measured)}"]
    except ShoalError as found:
        lines, fix = [f"  its memory was not predicted: {found.problems[0].what}"], first.fix
    except Exception:  # a second failure must not hide the first
        return error
    return _with_problems(error, Problem("N023", "\n".join([first.what, *lines]), fix), *more)


def _with_problems(error: RunFailed, *problems: Problem) -> RunFailed:
    other = type(error)(*problems, title=error.title)
    other.__dict__.update({name: value for name, value in vars(error).items() if name not in ("problems", "title")})
    return other


def _measured_beside(memory: PeakMemory, measured: Mapping[str, int]) -> float:
    """Bytes that were neither states nor there before. States that were not counted are those of the prediction."""
    states = sum(measured.get(cause, getattr(memory, cause)) for cause in STATES)
    return max(0.0, measured["total"] - measured.get("outside", 0) - states)


def _excess(memory: PeakMemory, measured: Mapping[str, int]) -> Excess:
    """What the rank held over its prediction: more of the predicted, or something else, if it is far more."""
    predicted, actual = beside_states(memory), _measured_beside(memory, measured)
    if actual <= predicted:
        return Excess()
    return Excess(factor=actual / predicted) if actual <= LIKELY * predicted else Excess(fixed=actual - predicted)


def _table(memory: PeakMemory, measured: Mapping[str, int]) -> list[str]:
    rows: list[tuple[str, float, float | None]]
    rows = [(cause, getattr(memory, cause), measured.get(cause)) for cause in STATES]
    outside = measured.get("outside", 0) or None
    rows.append((OTHER, beside_states(memory), _measured_beside(memory, measured)))
    lines = [f"    {name:<28}{size(one):>11}{size(two) if two is not None else '-':>12}" for name, one, two in rows]
    before = [f"    {OUTSIDE:<28}{'-':>11}{size(outside):>12}"] if outside else []
    return [f"  {'memory of rank ' + str(measured['rank']):<30}  predicted    measured", *lines, *before]


def _verdict(memory: PeakMemory, measured: Mapping[str, int]) -> str:
    """Name the cause that grew most over its prediction."""
    grown = {cause: measured[cause] - getattr(memory, cause) for cause in STATES if cause in measured}
    grown[OTHER] = _measured_beside(memory, measured) - beside_states(memory)
    cause = max(grown, key=lambda each: grown[each])
    requested = f", {size(measured['requested'])} of it in the allocation that failed" if _is_one(measured) else ""
    if grown[cause] > NOTED * memory.reserved:
        return f"{cause} took {size(grown[cause])} more than predicted{requested}"
    limit, needed = measured.get("limit", 0), memory.reserved + measured.get("outside", 0)
    more = f", which is more than the {size(limit)} that a rank has" if 0 < limit < needed else ""
    grew = f" by much: {cause} took {size(grown[cause])} more" if grown[cause] > 0 else ""
    return f"no cause grew over its prediction{grew}; {size(needed)} are needed together{more}"


def _is_one(measured: Mapping[str, int]) -> bool:
    """Whether one allocation is a large part of the total."""
    return measured.get("requested", 0) > measured["total"] / 2


def _fitting(task: Task, recipe: Recipe, measured: Mapping[str, int], excess: Excess) -> str:
    """The nearest plan that fits, to type; empty: there is none. A rank had less than it needed when it failed."""
    outside = measured.get("outside", 0) or task.cluster.device.context
    known = [measured[name] for name in ("limit", "total") if measured.get(name)]
    found = nearest_fitting(task, recipe.plan, limit=min(known) * (1 - SPARE) - outside, excess=excess)
    if found is None:
        return ""
    now, then = (excess.expected(memory) for memory in (task.memory(recipe.plan), found.memory))
    return f'--plan "{found.plan.brief()}": {size(then)} of tensors expected, in place of {size(now)}'


def _nothing_fits(task: Task, memory: PeakMemory, measured: Mapping[str, int], excess: Excess) -> str:
    ranks = task.cluster.num_devices
    nothing = f"no plan for {ranks} rank{'s' * (ranks != 1)} fits"
    if _is_one(measured):
        return f"a smaller tensor of {size(measured['requested'])} where the traceback ends; {nothing}"
    if excess.fixed > memory.reserved:
        return f"keep no tensors between steps (loss.item(), output.detach()); {nothing}"
    if memory.states > memory.reserved / 2:
        return f"more ranks with --plan.zero 3, or a smaller model; {nothing}"
    return f"{'--data.seq_len with fewer tokens' if task.workload.is_transformer else 'a smaller model'}; {nothing}"


def size(number: float) -> str:
    """Bytes in GiB or MiB.

    >>> size(3 * 2**30), size(2**20), size(2**50)
    ('3.00 GiB', '1.00 MiB', '1024.00 TiB')
    """
    if number >= 1024 * GIB:
        return f"{number / GIB / 1024:.2f} TiB"
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.2f} MiB"
