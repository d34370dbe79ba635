"""A run that is kept: when it is saved, where to, and from which step it goes on.

Two places can hold its steps, in one format:

    disk      a folder or an object store; every so often, and when the run ends or is asked to stop
    memory    a folder in shared memory, which outlives the workers but not the machine; every step or few, if asked for

A run goes on from the newest step that is whole in either.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from shoal.checkpoint.async_saver import AsyncSaver
from shoal.checkpoint.load import load_newest, load_step
from shoal.checkpoint.storage.manifest import Manifest
from shoal.checkpoint.storage.store import Store, find
from shoal.comm.all_or_none import on_main
from shoal.config.duration import Duration
from shoal.config.recipe import Recipe
from shoal.config.resume_compat import reject_changes
from shoal.errors import ShoalError
from shoal.files import PrivateFolder
from shoal.launch.worker import note_saved
from shoal.observe.run_directory import locked
from shoal.train.recipe.memory_rescue import DISK, memory_folder, own_folder, place_of
from shoal.train.recipe.preflight import Job, units
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of, restore, settle_to_save, state_of

FIRST_AUTO = 30.0
"""Seconds after which `auto` saves for the first time: what a save costs is not known before."""
LEAST_AUTO = 5.0

Say = Callable[[str], None]


def best_interval(cost: float, mtbf: float) -> float:
    """Seconds between two saves for which the time that they cost and the time that is lost to a failure, half an
    interval on average, are least together (Young's formula).

    >>> round(best_interval(cost=0.5, mtbf=24 * 3600))
    294
    """
    return math.sqrt(2 * cost * mtbf)


@dataclass(kw_only=True)
class Autosaver:
    """The saves of one run. Every rank has one and calls the same methods after the same steps."""

    run: Run
    job: Job
    disk: AsyncSaver
    memory: AsyncSaver | None
    say: Say
    facts: Callable[[], dict[str, Any]]
    """What is saved beside what the run itself knows."""
    every_steps: int | None = None
    """Steps between two saves; None: the clock decides; 0: only at the end."""
    every_seconds: float | None = None
    """The same in seconds; None, with the clock: `auto`."""
    memory_steps: int = 0
    last: int | None = None
    """The step that was copied last, to be saved."""
    saved: int | None = None
    """The newest step that is on the disk."""
    num_saved: int = 0
    num_failed: int = 0
    _clock: float = field(default_factory=time.monotonic)
    _cost: float | None = None
    _has_room: bool = False
    _is_over: bool = False
    _lock: BinaryIO | None = None

    @classmethod
    def of(cls, run: Run, job: Job, *, directory: Path, memory_root: Path | None, say: Say) -> Autosaver:
        """Every rank calls it."""
        settings, per = job.recipe.checkpoint, units(job.recipe, job.training)
        every = None if settings.every == "auto" else Duration.parse(settings.every)
        store = Store.at(settings.dir or directory / "checkpoints")
        disk = AsyncSaver(store, run.world.beside(), keep=settings.keep, on_saved=note_saved)
        memory_steps = settings.memory_every.steps(**per) or 0
        memory = None
        if memory_steps:
            _refuse_several_hosts(run)
            how = f"{settings.memory_dir!r} cannot hold the state of this run"
            fix = "--checkpoint.memory_dir of a memory file system, or --checkpoint.memory_every 0step"
            place = memory_root, settings.memory_dir, directory, disk.store.where
            root = on_main(run.world, lambda: _memory_root(*place, say), failed=how, fix=fix)
            memory = AsyncSaver(Store(root), run.world.beside(), keep=1, on_saved=note_saved)
        return cls(
            run=run,
            job=job,
            disk=disk,
            memory=memory,
            say=say,
            facts=dict,
            every_steps=every.steps(**per) if every is not None else None,
            every_seconds=every.seconds if every is not None else None,
            memory_steps=memory_steps,
        )

    # ---- going on --------------------------------------------------------------------------------------------------

    def go_on(self, resume: str) -> Manifest | None:
        """Fill the run with the step that it goes on from; None: it begins. Every rank calls it."""
        store, world = self.disk.store, self.run.world
        if resume.isdecimal():
            manifest: Manifest | None = load_step(store, world, holder_of(self.run), int(resume))
        else:
            stores = [self.memory.store, store] if self.memory is not None else [store]
            manifest = load_newest(stores, world, holder_of(self.run), self.say)
        if manifest is None and resume == "latest":
            raise nothing_to_resume(store)
        if manifest is not None:
            refuse_other_recipe(manifest, self.job.recipe, store)
            self._compare_data(manifest)
            restore(self.run, manifest)
            self._archive(after=manifest.step)
            there = on_main(world, store.steps, failed=f"{store.where} was not read")
            self.last = self.saved = manifest.step if manifest.step in there else None  # else it is in memory alone
        return manifest

    def _compare_data(self, manifest: Manifest) -> None:
        if accepted := refuse_other_data(manifest, self.job, self.disk.store):
            self.say(f"the data has changed since step {manifest.step}, as data.changed accepts: {accepted}")

    def reset(self) -> None:
        """What an earlier run has left in the same place is not of this one."""
        self._archive(after=-1)

    def _archive(self, after: int) -> None:
        """Later steps are damaged, or of a run that now takes another way: nobody may go on from them by mistake."""

        def act() -> None:
            self.disk.store.archive(after=after)
            if self.memory is not None:
                self.memory.store.drop(after=after)

        fix = "--checkpoint.dir that can be written to"
        on_main(self.run.world, act, failed=f"steps after {after} were not set aside", fix=fix)

    def refuse_too_little_room(self) -> None:
        """Before the first step: raise, if what will be saved has no place."""
        num_bytes = self.run.world.all_reduce_host([float(self._expected_bytes())]).wait()[0]
        disk, memory = self.disk.store, self.memory

        def look() -> None:
            disk.room(
                int(num_bytes) * max(1, (self.disk.keep or 2) + 1 - len(disk.steps()))
            )  # those that stay, and a draft
            if memory is not None:
                _refuse_short_memory(memory.store.root, int(num_bytes))

        on_main(self.run.world, look, failed="the checkpoints have no place", fix="--checkpoint.dir SOMEWHERE")

    def claim_store(self) -> None:
        """Where steps are saved outside of the run directory: raise, if another run saves there now."""
        disk = self.disk.store

        def claim() -> None:
            if self.job.recipe.checkpoint.dir is not None and disk.disk.renames:
                self._lock = locked(disk.root)

        on_main(self.run.world, claim, failed=f"{disk.where} cannot be locked", fix="--checkpoint.dir ELSEWHERE")

    def release(self) -> None:
        """Let others save there."""
        if self._lock is not None:
            self._lock.close()

    def _expected_bytes(self) -> int:
        """What this rank will tell: parameters, and what the optimizer will keep for them."""
        composed, total = self.run.composed, 0
        trained = {id(parameter) for parameter in self.run.trained_parameters()}
        for name, parameter in composed.named.items():
            if composed.is_owner(name):
                size = math.prod(composed.shard_box(name)[1]) * parameter.element_size()
                total += size * (1 + 2 * (id(parameter) in trained))
        return total

    # ---- saving ----------------------------------------------------------------------------------------------------

    @property
    def wants(self) -> bool:
        """Whether the clock says that it is time; the main rank's is the one that counts."""
        if self.every_steps is not None or self.disk.is_busy:
            return False
        passed = time.monotonic() - self._clock
        if self.every_seconds is not None:
            return passed >= self.every_seconds
        if self._cost is None:
            return passed >= FIRST_AUTO
        return passed >= max(LEAST_AUTO, best_interval(self._cost, self.job.recipe.checkpoint.mtbf.seconds or 86400.0))

    def stepped(self, *, is_wanted: bool) -> None:
        """After a step: save it, if it is time for that. `is_wanted`: the main rank's clock has said so."""
        done = self.run.steps_done
        if not self._has_room:
            self._has_room = True
            for saver in (self.disk, self.memory):
                if saver is not None:
                    saver.make_room(holder_of(self.run))
        if self.memory is not None and done % self.memory_steps == 0:
            self._begin(self.memory)
        if is_wanted or (self.every_steps and done % self.every_steps == 0):
            self._save()
        self._tell()

    def save_end(self) -> None:
        """Begin to save the last step. It is written beside the evaluation that follows, and does not wait for it."""
        self._is_over = True
        if self.last != self.run.steps_done:
            self._save()

    def end(self) -> None:
        """Wait until the last step is on the disk."""
        self.close()
        if self.memory is not None and self.run.is_main and self.saved == self.run.steps_done:
            shutil.rmtree(self.memory.store.root, ignore_errors=True)

    def close(self) -> None:
        """Wait for what is on its way."""
        for saver in (self.disk, self.memory):
            if saver is not None:
                saver.finish()
        self._tell()

    def _save(self) -> None:
        self._cost = self._begin(self.disk)
        self.last = self.run.steps_done
        self._clock = time.monotonic()

    def _begin(self, saver: AsyncSaver) -> float:
        """Returns the seconds that the copy took."""
        settle_to_save(self.run)
        recipe, data = self.job.recipe.model_dump(mode="json"), self.job.fingerprint.to_mapping()
        state = {**state_of(self.run), "recipe": recipe, "data": data, **self.facts()}
        return saver.begin(holder_of(self.run), step=self.run.steps_done, state=state)

    def _tell(self) -> None:
        for saver in (self.disk, self.memory):
            if saver is not None:
                saver.raise_error()
        for note in self.disk.store.take_notes():
            self.say(note)
        for saved in self.disk.take_news():
            if saved.failure:
                self.num_failed += 1
                self.say(f"NOT SAVED{'' if self._is_over else ', training goes on'}: {saved.failure}")
            else:
                self.num_saved += 1
                self.saved = saved.step
                if saved.note:
                    self.say(saved.note)
        for kept in self.memory.take_news() if self.memory is not None else ():
            if kept.failure:
                self.say(f"NOT KEPT IN MEMORY, training goes on: {kept.failure}")

    def summary(self) -> dict[str, Any]:
        """What came of it, for the summary of the run."""
        return {
            "saves": self.num_saved,
            "saves_failed": self.num_failed,
            "saved_step": self.saved,
            "seconds_held_by_saves": self.disk.seconds_held + self.disk.seconds_waited,
            "checkpoints": self.disk.store.where,
        }


def nothing_to_resume(store: Store) -> ShoalError:
    """What is said where a run was to go on."""
    return ShoalError(
        f"there is no checkpoint in {store.where} to go on from", fix="--resume auto, or the --run.dir of a run"
    )


def refuse_other_recipe(manifest: Manifest, recipe: Recipe, store: Store) -> None:
    """Raise if the run of a step cannot go on as this recipe."""
    if saved := manifest.state.get("recipe"):  # weights that were imported have none
        reject_changes(saved, recipe, where=store.where)


def refuse_other_data(manifest: Manifest, job: Job, store: Store) -> str:
    """Raise if the run of a step has seen other data than there is now, unless the recipe accepts that; returns what
    was accepted. Steps of before fingerprints were saved, and weights that were imported, say nothing of it."""
    saved = manifest.state.get("data")
    found = job.fingerprint.difference(saved) if isinstance(saved, dict) else ""
    if found and job.recipe.data.changed == "reject":
        raise ShoalError(
            f"the data of {job.recipe.data.source!r} is not what the run in {store.where} was trained on: {found};"
            " nothing was touched",
            fix="the data as it was; or --resume fresh to start over; or --data.changed accept to resume on the"
            " changed data, of which samples may then be seen twice or not at all in this epoch",
        )
    return found


def name_in_memory(directory: Path) -> str:
    """How the name of a folder begins that holds the state of a run which no launcher watches over: known by the
    directory of the run, so that the same command finds it again."""
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return f"shoal-run-{os.geteuid()}-{name}-"


def start_from(run: Run, where: str) -> int:
    """Begin with the weights of a step of another run, or of what was imported; every rank calls it. Returns that
    step."""
    store, step = find(where)
    newest = on_main(run.world, lambda: store.steps()[-1], failed=f"{where!r} was not read")
    return load_step(store, run.world, holder_of(run), newest if step is None else step, only_weights=True).step


def refuse_bad_start(run: Run, recipe: Recipe, *, is_fresh: bool) -> None:
    """Raise if there are no weights to start from, or if to begin anew would remove them; every rank calls it."""
    how = {"failed": f"{recipe.run.start_from!r} cannot be read", "fix": "--run.start_from a run directory"}
    on_main(run.world, lambda: look_for_start(recipe, is_fresh=is_fresh), **how)


def look_for_start(recipe: Recipe, *, is_fresh: bool) -> None:
    """The same, by one process."""
    where, directory = str(recipe.run.start_from), recipe.run.dir
    if is_fresh and directory and Path(where).resolve().is_relative_to(Path(directory).resolve()):
        raise ShoalError(
            f"to begin anew in {directory!r} removes {where!r}, from which the run is to start",
            fix="--run.dir SOMEWHERE_ELSE",
        )
    if not find(where)[0].steps():
        raise ShoalError(
            f"there is no checkpoint in {where!r} to start from",
            fix="a run directory, or one of its steps; files of others: shoal checkpoint import"
            f" {where} imported, and then --run.start_from imported",
        )


def _memory_root(given: Path | None, memory_dir: str, directory: Path, saves_to: str, say: Say) -> Path:
    """The folder in memory that this run uses: the launcher's, or the run's own, which is private to this user."""
    root = given or own_folder(memory_dir, name_in_memory(directory), say)
    with memory_folder(str(root.parent)) as parent, PrivateFolder(root.name, parent=parent) as folder:
        folder.write(DISK, place_of(saves_to).encode())
    return root


def _refuse_several_hosts(run: Run) -> None:
    if run.world.local_size < run.world.size:
        raise ShoalError(
            f"the memory of one host cannot keep what {run.world.size} ranks on several hosts have",
            fix="--checkpoint.memory_every 0step, and --checkpoint.every as often as you like",
        )


def _refuse_short_memory(root: Path, num_bytes: int) -> None:
    """Two copies in shared memory: the one that is whole, and the one on its way."""
    own = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())  # of this run, before a restart
    free = min(shutil.disk_usage(root.parent).free, _available()) + own
    if free < 2 * num_bytes:
        raise ShoalError(
            f"{root.parent} has room for {free / 2**30:.1f} GiB, and keeping the state of this run in memory needs"
            f" {2 * num_bytes / 2**30:.1f} GiB",
            fix="--checkpoint.memory_every 0step, or --checkpoint.memory_dir of a larger memory file system",
        )


def _available() -> int:
    """Memory of this host that is not in use."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
