"""The layout of the ranks, and the pipeline's schedule, drawn from the plan that ran."""

from __future__ import annotations

from shoal.blueprint.layout_drawing import draw_layout
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.draw import svg
from shoal.blueprint.schedules.schedule_orders import make_schedule
from shoal.blueprint.schedules.simulate import StageCost, simulate
from shoal.errors import ShoalError
from shoal.pages.html import section, text
from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.svg import as_image

MOST_RANKS = 512
MOST_ACTIONS = 3_000
"""Boxes of a drawn schedule."""


def layout(run: RunRecord) -> str:
    """The plan in words, its grid of ranks, and its schedule."""
    section_of_data = run.recipe.get("data")
    batch = number(section_of_data.get("global_batch")) if isinstance(section_of_data, dict) else 0
    return layout_of(run.plan, batch) if run.plan is not None else ""


def layout_of(plan: Plan, batch: float = 0) -> str:
    """A plan in words, its grid of ranks, and its schedule with a global batch; 0: the batch is not known."""
    try:
        grid = plan.layout
    except ShoalError:
        return ""
    ranks = grid.world_size
    body = f'<p class="plan"><code>{text(plan.brief())}</code> on {ranks:,} rank{"s" if ranks > 1 else ""}</p>'
    if 1 < ranks <= MOST_RANKS:
        body += f'<div class="wide"><pre class="grid">{text(draw_layout(grid), 200_000)}</pre></div>'
    elif ranks > MOST_RANKS:
        body += f'<p class="note">More than {MOST_RANKS} ranks are not drawn.</p>'
    return section("Layout", body + _schedule(plan, batch), name="layout")


def _schedule(plan: Plan, batch: float) -> str:
    """The schedule as a timeline, with the usual proportion of forward to backward."""
    if plan.layout.pp < 2 or plan.schedule is None or not 0 < batch < 1e6:
        return ""
    try:
        microbatches, v = plan.num_microbatches(int(batch)), plan.v or 1
        if 2 * microbatches * plan.layout.pp * v > MOST_ACTIONS:
            return f'<p class="note">{microbatches:,} microbatches on {plan.layout.pp} stages are not drawn.</p>'
        made = make_schedule(plan.schedule, num_ranks=plan.layout.pp, v=v, num_microbatches=microbatches)
        timeline = simulate(made, StageCost(forward=1, input_grad=1, weight_grad=1))
    except (ShoalError, ZeroDivisionError):
        return ""
    title = f"{plan.schedule}, {plan.layout.pp} stages, {microbatches} microbatches"
    note = "Predicted, with a backward that takes twice as long as its forward and nothing for sending."
    return f'<p class="note">{note}</p><div class="wide">{as_image(svg(timeline, title), title)}</div>'
