"""Find durations of no step, and times where steps are expected: neither can be converted to the other."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.recipe import Recipe
from shoal.errors import Problem


def check_durations(recipe: Recipe) -> Iterator[Problem]:
    """Find all wrong durations that can be found without the data."""
    optim, run, checkpoint = recipe.optim, recipe.run, recipe.checkpoint
    if run.duration.amount == 0:
        yield no_step(recipe)
    in_steps = (
        ("run.evaluate_every", run.evaluate_every, 100),
        ("run.check_replicas", run.check_replicas, 100),
        ("run.check_compute", run.check_compute, 100),
        ("run.profile", run.profile, 5),
        ("checkpoint.memory_every", checkpoint.memory_every, 1),
    )
    for name, value, steps in in_steps:
        if value.seconds is not None:
            yield Problem("R029", f"{name} must be a number of steps, got the time {value}", f"--{name} {steps}step")
    if not checkpoint.mtbf.seconds:
        yield Problem("R030", f"checkpoint.mtbf must be a time, got {checkpoint.mtbf}", "--checkpoint.mtbf 24h")
    if optim.warmup.seconds and run.duration.seconds is None and not run.fast_dev_run:
        what = f"optim.warmup must be in steps where run.duration is {run.duration}, got the time {optim.warmup}"
        yield Problem("R031", what, "--optim.warmup 20step, or a time as --run.duration, such as 10min")


def no_step(recipe: Recipe) -> Problem:
    """The problem of a run that is shorter than one step."""
    what = f"run.duration must be at least one step, got {recipe.run.duration}"
    return Problem("R028", what, "--run.duration 100step")
