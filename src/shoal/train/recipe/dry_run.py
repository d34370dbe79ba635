"""Check a run against its directory without starting it, for `shoal train --dry-run`."""

from __future__ import annotations

from contextlib import suppress

from shoal.checkpoint.storage.manifest import Manifest
from shoal.checkpoint.storage.store import Store
from shoal.errors import ShoalError
from shoal.observe.run_directory import RunDirectory
from shoal.train.recipe.preflight import Job
from shoal.train.recipe.saving.autosave import (
    nothing_to_resume,
    reject_other_data,
    reject_other_recipe,
)
from shoal.train.recipe.saving.run_storage import may_resume
from shoal.train.recipe.saving.start_weights import reject_bad_start_from


def dry_run(job: Job, resume: str) -> None:
    """Raise if a run of the recipe would be rejected now. Nothing is created or changed, and no URL is read."""
    recipe = job.recipe
    settings, checkpoint = recipe.run, recipe.checkpoint
    resume = "fresh" if settings.overwrite else resume
    if settings.start_from is not None and "://" not in settings.start_from:
        reject_bad_start_from(recipe, is_fresh=resume == "fresh")
    directory = RunDirectory.preview(recipe, resume)
    if not may_resume(resume, directory, recipe) or "://" in (checkpoint.dir or ""):
        return
    store = Store.at(checkpoint.dir or directory.path / "checkpoints")
    manifest = store.manifest(int(resume)) if resume.isdecimal() else _newest(store)
    if manifest is not None:
        reject_other_recipe(manifest, recipe, store)
        reject_other_data(manifest, job, store)
    elif resume == "latest" and not checkpoint.memory_every.amount:  # else a step may be in memory
        raise nothing_to_resume(store)


def _newest(store: Store) -> Manifest | None:
    """The manifest of the newest step that can be read; None: there is none."""
    for step in reversed(store.steps()):
        with suppress(ShoalError):  # a run would try the step before it, too
            return store.manifest(step)
    return None
