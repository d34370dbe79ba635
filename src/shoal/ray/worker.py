"""One worker of Ray as one rank: train the recipe, or call the function, and report to Ray."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.observe.failure_event import noting_failure
from shoal.observe.jsonable import jsonable
from shoal.observe.run_directory import RunDirectory
from shoal.ray.reporting import Reporter
from shoal.ray.scaling import with_plan_for
from shoal.ray.session import Session, begin, end
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.loop import train
from shoal.train.recipe.memory.fits import check_fits
from shoal.train.recipe.preflight import Job, check_recipe


def train_recipe(order: dict[str, Any]) -> dict[str, Any] | ShoalError:
    """Train a recipe on this worker. Returns the summary, or the error of a recipe that no restart would mend.

    Ray calls it again on every worker after a failure and for another number of workers. The run directory is the same,
    so the run resumes there.
    """
    start_time = time.time()
    if Path(order["cwd"]).is_dir():  # relative paths of a recipe; Ray has changed the directory
        os.chdir(order["cwd"])
    place = _placement()
    job = _agreed_job(Recipe.model_validate(order["recipe"]), place)
    if isinstance(job, ShoalError):
        return job
    reporter = _reporter()
    invocation = RunInvocation(
        save=not job.recipe.run.fast_dev_run,
        quiet=order["quiet"],
        start_time=start_time,
        resume=order["resume"],
        command=order["command"],
        sinks=(reporter,),
    )
    with noting_failure(job.recipe, invocation.command):
        summary = jsonable(train(place, None, job, invocation))
    is_main = place.rank == 0
    if is_main and summary["run_directory"]:
        RunDirectory(Path(summary["run_directory"])).write_summary(summary)
    newest = reporter.finish()
    _report_end({**newest, **summary}, f"{order['directory']}/checkpoints", is_main=is_main)
    return summary


def call_function(order: dict[str, Any]) -> Any:
    """Call the user's function on this worker, with `shoal.ray.report` and `shoal.ray.checkpoint_directory`."""
    reporter = _reporter()
    begin(Session(reporter, order["directory"]))
    function: Callable[..., Any] = order["function"]
    given = order["config"] if order["config"] is not None else {}
    try:
        found = function(given) if inspect.signature(function).parameters else function()
    finally:
        end()
    newest = reporter.finish()
    is_main = _placement().rank == 0
    _report_end(newest, f"{order['directory']}/checkpoints", is_main=is_main)
    return found


def _placement() -> Placement:
    place = read_environment(os.environ)
    assert place is not None, "Ray sets RANK and its like on every worker"
    return replace(place, node=import_module("ray.train").get_context().get_node_rank())


def _reporter() -> Reporter:
    return Reporter(import_module("ray.train").report, _broadcast)


def _broadcast(value: Any) -> Any:
    """The value of rank 0."""
    return import_module("ray.train.collective").broadcast_from_rank_zero(value)


def _agreed_job(recipe: Recipe, place: Placement) -> Job | ShoalError:
    """The job of all ranks, or rank 0's reason why there is none.

    Rank 0 plans: the machines may differ in their number of workers and in their calibration. A problem that only
    another rank has, such as a missing file, is raised there.
    """
    if place.rank == 0:
        try:
            job = _job(with_plan_for(recipe, place.world_size, place.local_world_size), place)
        except ShoalError as error:
            _broadcast(error)
            return error
        _broadcast(job.recipe.plan)
        return job
    found = _broadcast(None)
    if isinstance(found, ShoalError):
        return found
    run = recipe.run.model_copy(update={"planned": False})
    return _job(recipe.model_copy(update={"plan": found, "run": run}), place)


def _job(recipe: Recipe, place: Placement) -> Job:
    return check_recipe(recipe, place.world_size, check_size=check_fits(place.local_world_size)).job()


def _report_end(metrics: dict[str, Any], checkpoints: str, *, is_main: bool) -> None:
    """Report the last numbers, and the newest step on a disk as Ray's checkpoint; it is not copied."""
    train = import_module("ray.train")
    checkpoint = None
    if is_main and "://" not in checkpoints:
        from shoal.checkpoint.storage.locate import folder_of

        with suppress(ShoalError):  # there is no step
            checkpoint = train.Checkpoint(str(folder_of(Path(checkpoints))))
    train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)
