"""What a run would find in its directory and refuse, told without starting it: for `shoal train --dry-run`."""

from __future__ import annotations

from contextlib import suppress

from shoal.checkpoint.storage.manifest import Manifest
from shoal.checkpoint.storage.store import Store
from shoal.errors import ShoalError
from shoal.observe.run_directory import RunDirectory
from shoal.train.recipe.autosave import look_for_start, nothing_to_resume, refuse_other_data, refuse_other_recipe
from shoal.train.recipe.preflight import Job


def dry_run(job: Job, resume: str) -> None:
    """Raise as a run of the recipe would that begins now. Nothing is made, changed or asked of another machine."""
    recipe = job.recipe
    settings, kept = recipe.run, recipe.checkpoint
    resume = "fresh" if settings.overwrite else resume
    if settings.start_from is not None and "://" not in settings.start_from:
        look_for_start(recipe, is_fresh=resume == "fresh")
    directory = RunDirectory.preview(recipe, resume)
    is_elsewhere = kept.dir is not None  # where steps may be although the directory is new
    goes_on = resume not in ("auto", "fresh") or (resume == "auto" and (directory.resumes or is_elsewhere))
    if not goes_on or "://" in (kept.dir or ""):
        return
    store = Store.at(kept.dir or directory.path / "checkpoints")
    manifest = store.manifest(int(resume)) if resume.isdecimal() else _newest(store)
    if manifest is not None:
        refuse_other_recipe(manifest, recipe, store)
        refuse_other_data(manifest, job, store)
    elif resume == "latest" and not kept.memory_every.amount:  # else a step may be in memory
        raise nothing_to_resume(store)


def _newest(store: Store) -> Manifest | None:
    """Of the newest step that can be read; None: there is none."""
    for step in reversed(store.steps()):
        with suppress(ShoalError):  # a run would try the one before it, too
            return store.manifest(step)
    return None
