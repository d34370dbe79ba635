"""The directory and the checkpoints of a run, behind one object; `NoStorage` stands in where nothing is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.peers.host_ranks import HostRanks, on_leaders
from shoal.checkpoint.storage.manifest import Manifest
from shoal.comm.all_or_none import on_main
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.observe.events import append_event
from shoal.observe.progress import ProgressLine
from shoal.observe.run_directory import RunDirectory
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.preflight import Job, steps_of
from shoal.train.recipe.saving.autosave import Autosaver
from shoal.train.recipe.saving.host_storage import claim_directories, has_begun
from shoal.train.recipe.saving.start_weights import check_start_from, start_with_weights
from shoal.train.run import Run


class NoStorage:
    """A run without a directory and without checkpoints, such as a `fast_dev_run`."""

    path: Path | None = None
    """The run directory."""
    manifest: Manifest | None = None
    """Of the step that the run resumes from; None: it starts at step 0."""
    beside: str = ""
    """Why the run before this one is left alone; empty: there is none."""
    evaluation: tuple[int, float] | None = None
    """Step and loss of the last evaluation before the run was interrupted."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The state in the manifest of the resumed step."""
        return self.manifest.state if self.manifest is not None else {}

    @property
    def is_due(self) -> bool:
        """Whether it is time for a save by this rank's clock."""
        return False

    def save_also(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Add facts to the state of every checkpoint."""

    def after_step(self, *, is_due: bool) -> None:
        """Save the step if a save is due."""

    def begin_last_save(self) -> None:
        """Start to save the last step."""

    def finish(self) -> None:
        """Wait until the last step is saved."""

    def close(self) -> None:
        """Release the run directory and the checkpoint directory."""

    def summary(self) -> dict[str, Any]:
        """The part of the run's summary that is about saves."""
        return {}


class RunStorage(NoStorage):
    """The claimed run directory and the autosaver of one run."""

    def __init__(self, directory: RunDirectory, autosaver: Autosaver, manifest: Manifest | None) -> None:
        self._directory, self._autosaver = directory, autosaver
        self.path, self.manifest, self.evaluation = directory.path, manifest, directory.evaluation
        self.beside = directory.beside

    @property
    def is_due(self) -> bool:
        """Whether it is time for a save by this rank's clock."""
        return self._autosaver.is_due

    def save_also(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Add facts to the state of every checkpoint."""
        self._autosaver.facts = facts

    def after_step(self, *, is_due: bool) -> None:
        """Save the step if a save is due."""
        self._autosaver.after_step(is_due=is_due)

    def begin_last_save(self) -> None:
        """Start to save the last step."""
        self._autosaver.begin_last_save()

    def finish(self) -> None:
        """Wait until the last step is saved."""
        self._autosaver.finish()

    def close(self) -> None:
        """Release the run directory and the checkpoint directory."""
        self._autosaver.release()
        self._directory.close()

    def summary(self) -> dict[str, Any]:
        """The part of the run's summary that is about saves."""
        return self._autosaver.summary()


def open_storage(run: Run, job: Job, line: ProgressLine, invocation: RunInvocation) -> RunStorage:
    """Claim the run directory and load the step to resume from. Every rank calls it; all raise or none does."""
    host, command, is_restart = invocation.host, invocation.command, invocation.generation > 0
    is_first = not invocation.is_replacement  # else this very job has trained in the directory before
    hosts = HostRanks.shared(run.world) if host is None else host.of_disk(run.world)
    resume = "fresh" if job.recipe.run.overwrite else invocation.resume
    is_begun = not is_first or invocation.saved_before > 0  # the host with the run directory may be lost
    continues = is_restart and (is_begun or has_begun(run.world, job.recipe, hosts, command=command))
    if continues:
        resume = "auto"
    if job.recipe.run.start_from is not None:
        check_start_from(run, job.recipe, is_fresh=resume == "fresh")  # before anything is removed
    if is_first:
        directory = claim_directories(run.world, job.recipe, resume, hosts, command=command, is_restart=is_restart)
    else:
        directory = _claim_again(run.world, job.recipe, command)
    autosaver: Autosaver | None = None
    try:
        autosaver = Autosaver.of(
            run, job, directory=directory.path, memory_root=invocation.memory_root, say=line.say, host=host
        )
        if is_first:
            autosaver.check_free_space(continues=continues or (resume == "auto" and directory.resumes))
        autosaver.claim_store()
        resumes = may_resume(resume, directory, job.recipe)
        has_base = run.composed.has_adapters
        if has_base:  # which no checkpoint of this run has
            load_first_weights(run, job, line)
        manifest = autosaver.resume(resume) if resumes else None
        _reject_shorter_duration(run, job, directory)
        if manifest is None and not has_base:
            load_first_weights(run, job, line)
        autosaver.become_writer()
        if not resumes:
            autosaver.reset()
        # All checks have passed. No file of metrics is opened before this.
        directory.evaluation = on_leaders(
            run.world,
            hosts,
            lambda: _begin(
                directory,
                job,
                run.steps_done,
                restarts=invocation.generation,
                writes_recipe=is_first,
                continues=continues,
            ),
            failed=f"the run directory {str(directory.path)!r} cannot be written",
            fix="--run.dir WRITABLE_DIRECTORY",
        )
    except BaseException:
        if autosaver is not None:
            autosaver.release()
        directory.give_up()
        raise
    return RunStorage(directory, autosaver, manifest)


def may_resume(resume: str, directory: RunDirectory, recipe: Recipe) -> bool:
    """Whether there may be a step to resume from. With `checkpoint.dir`, steps can exist although the directory is
    new."""
    if resume in ("auto", "fresh"):
        return resume == "auto" and (directory.resumes or recipe.checkpoint.dir is not None)
    return True


def load_first_weights(run: Run, job: Job, line: ProgressLine) -> None:
    """Load the weights that the run starts with, unless they are drawn from the seed."""
    where = start_with_weights(run, job.recipe)
    if where is not None:
        line.note(f"start  from the weights of {where}")


def _reject_shorter_duration(run: Run, job: Job, directory: RunDirectory) -> None:
    num_steps = steps_of(job)
    if num_steps is not None and run.steps_done > num_steps:
        raise ShoalError(
            f"run.duration must be at least the {run.steps_done:,} steps that the run in {str(directory.path)!r} has"
            f" made, got {num_steps:,}",
            fix=f"--run.duration {run.steps_done + 1}step or more, or --resume STEP to resume from an earlier step",
            code="C032",
        )


def _begin(
    directory: RunDirectory, job: Job, steps_done: int, *, restarts: int, writes_recipe: bool, continues: bool
) -> tuple[int, float] | None:
    """Write the recipe, drop metrics of steps that will be repeated; returns the last evaluation that stays."""
    if writes_recipe:
        directory.begin(job.recipe, continues=continues)
    reason = f"restart {restarts}" if restarts else ""
    reason += "" if writes_recipe else ": one rank was replaced"
    append_event(directory.path, "resumed" if steps_done or restarts else "started", steps_done, reason)
    # A run that resumes at its end reports its evaluation once more.
    directory.drop_metrics_after(steps_done, and_its_evaluation=steps_done == steps_of(job))
    return directory.last_evaluation()


def _claim_again(world: World, recipe: Recipe, command: str) -> RunDirectory:
    """The run directory of this job, after a worker was replaced; if that fails, raise on every rank."""
    own: list[RunDirectory] = []

    def act() -> tuple[Path, bool]:
        own.append(RunDirectory.claim_again(recipe, command))
        return own[0].path, own[0].resumes

    fix = "--run.dir WRITABLE_DIRECTORY"
    path, resumes = on_main(world, act, failed="the run directory cannot be created", fix=fix)
    return own[0] if own else RunDirectory(path, resumes=resumes)
