"""Save a run while it trains, and load the step that it resumes from.

A step can be saved in two places, in one format:

    disk      a folder or an object store; at intervals, and when the run ends or is stopped by a signal
    memory    a folder in shared memory, which outlives the workers but not the machine; every few steps, if set

A run resumes from the newest complete step in either.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from shoal.checkpoint.async_saver import AsyncSaver
from shoal.checkpoint.load import load_newest, load_step
from shoal.checkpoint.peers.fetch import load_newest_of_hosts
from shoal.checkpoint.peers.host_ranks import HostRanks, on_leaders
from shoal.checkpoint.state.base_fingerprint import reject_other_base
from shoal.checkpoint.storage.manifest import Manifest
from shoal.checkpoint.storage.store import Store
from shoal.comm.all_or_none import on_main
from shoal.config.data_source import spelled
from shoal.config.duration import Duration
from shoal.config.recipe import Recipe
from shoal.config.resume_compat import reject_changes
from shoal.data.sources.chat.form import prompt_form
from shoal.errors import ShoalError
from shoal.files import PrivateFolder
from shoal.launch.worker import note_saved
from shoal.observe.events import Event, append_event
from shoal.observe.run_lock import locked
from shoal.predict.goodput.recovery import best_interval
from shoal.train.recipe.preflight import Job, units
from shoal.train.recipe.saving.host_storage import HostStorage, bytes_on_host
from shoal.train.recipe.saving.memory_flush import DISK, MEMORY_FIX, memory_folder, own_folder, place_of
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of, prepare_to_save, restore, state_of

FIRST_AUTO = 30.0
"""Seconds after which `auto` saves for the first time; the cost of a save is not known before."""
LEAST_AUTO = 5.0
"""The shortest interval, in seconds, that `auto` chooses."""

Say = Callable[[str], None]


@dataclass(kw_only=True)
class Autosaver:
    """The saves of one run. Every rank has one and calls the same methods after the same steps."""

    run: Run
    job: Job
    disk: AsyncSaver
    memory: AsyncSaver | None
    disk_hosts: HostRanks
    memory_hosts: HostRanks
    say: Say
    facts: Callable[[], dict[str, Any]]
    """What is saved beside the state of the run."""
    directory: Path | None = None
    """The run directory, which gets a line about each save; None: there is none."""
    every_steps: int | None = None
    """Steps between two saves; None: by the clock; 0: only at the end."""
    every_seconds: float | None = None
    """Seconds between two saves by the clock; None: `auto`."""
    memory_steps: int = 0
    """Steps between two saves to memory; 0: none."""
    last: int | None = None
    """The last step whose save was started."""
    saved: int | None = None
    """The newest step on the disk."""
    num_saved: int = 0
    num_failed: int = 0
    _clock: float = field(default_factory=time.monotonic)
    _cost: float | None = None
    _has_buffers: bool = False
    _is_over: bool = False
    _lock: BinaryIO | None = None
    _has_own_stores: bool = False
    """Whether each host has a store of its own, in memory at least."""

    @classmethod
    def of(
        cls, run: Run, job: Job, *, directory: Path, memory_root: Path | None, say: Say, host: HostStorage | None = None
    ) -> Autosaver:
        """Build the autosaver of a recipe. Every rank calls it. `host`: the storage of this host, if there are several
        that `shoal train --hosts` has started."""
        settings, per = job.recipe.checkpoint, units(job.recipe, job.training)
        every = None if settings.every == "auto" else Duration.parse(settings.every)
        store = Store.at(settings.dir or directory / "checkpoints")
        world = run.world
        on_disk = HostRanks.shared(world) if host is None else host.of_disk(world)
        in_memory = HostRanks.shared(world) if host is None else host.of_memory(world)
        on_leaders(
            world, on_disk, store.check, failed=f"{store.where} cannot be read", fix="--checkpoint.dir ELSEWHERE"
        )
        own = world.with_own_connections()
        disk = AsyncSaver(store, own, keep=settings.keep, on_saved=note_saved, hosts=on_disk)
        memory_steps = settings.memory_every.steps(**per) or 0
        memory = None
        if memory_steps:
            if host is None:
                _reject_several_hosts(run)
            failed = f"{settings.memory_dir!r} cannot hold the state of this run"
            prefix = memory_folder_prefix(directory, "" if host is None else host.name)
            place = memory_root, settings.memory_dir, prefix, disk.store.where
            root = on_leaders(world, in_memory, lambda: _memory_root(*place, say), failed=failed, fix=MEMORY_FIX)
            own = world.with_own_connections()
            memory = AsyncSaver(Store(root), own, keep=1, on_saved=note_saved, hosts=in_memory)
        return cls(
            run=run,
            job=job,
            disk=disk,
            memory=memory,
            disk_hosts=on_disk,
            memory_hosts=in_memory,
            _has_own_stores=host is not None,
            say=say,
            facts=dict,
            directory=directory,
            every_steps=every.steps(**per) if every is not None else None,
            every_seconds=every.seconds if every is not None else None,
            memory_steps=memory_steps,
        )

    # ---- resume ----------------------------------------------------------------------------------------------------

    def resume(self, resume: str) -> Manifest | None:
        """Load the step to resume from; None: there is none. Every rank calls it."""
        store, world = self.disk.store, self.run.world
        if self._has_own_stores:
            manifest = self._load_from_hosts(int(resume) if resume.isdecimal() else None)
        elif resume.isdecimal():
            manifest = load_step(store, world, holder_of(self.run), int(resume))
        else:
            stores = [self.memory.store, store] if self.memory is not None else [store]
            manifest = load_newest(stores, world, holder_of(self.run), self.say)
        if manifest is None and resume not in ("auto", "fresh"):
            raise nothing_to_resume(store)
        if manifest is not None:
            reject_other_recipe(manifest, self.job.recipe, store)
            reject_other_base(self.run.composed, world, manifest, store.where)
            self._compare_data(manifest)
            restore(self.run, manifest)
            is_on_disk = manifest.step in self._archive(after=manifest.step)
            if len(self.disk_hosts.groups) > 1:  # else all ranks see one disk
                is_on_disk = all(world.all_gather_object(is_on_disk))
            self.last = self.saved = manifest.step if is_on_disk else None  # else it is only in memory
        return manifest

    def _load_from_hosts(self, step: int | None) -> Manifest | None:
        memory = [(self.memory.store, self.memory_hosts)] if self.memory is not None else []
        stores = [*memory, (self.disk.store, self.disk_hosts)]
        return load_newest_of_hosts(stores, self.run.world, holder_of(self.run), self.say, step=step)

    def _compare_data(self, manifest: Manifest) -> None:
        if accepted := reject_other_data(manifest, self.job, self.disk.store):
            self.say(f"the data has changed since step {manifest.step} (data.changed: accept): {accepted}")

    def reset(self) -> None:
        """Archive all steps that an earlier run has left in the same place."""
        self._archive(after=-1)

    def _archive(self, after: int) -> list[int]:
        """Archive later steps, so that no run resumes from them: they are damaged, or will be made again. Returns those
        that are left on the disk."""

        def act() -> list[int]:
            self.disk.store.archive(after=after)
            return list(self.disk.store.steps())

        failed, fix = f"steps after {after} cannot be archived", "--checkpoint.dir WRITABLE_DIRECTORY"
        world, memory = self.run.world, self.memory
        left = on_leaders(world, self.disk_hosts, act, failed=failed, fix=fix)
        if memory is not None:
            on_leaders(world, self.memory_hosts, lambda: memory.store.drop(after=after), failed=failed, fix=fix)
        return left

    def check_free_space(self, *, continues: bool) -> None:
        """Raise before the first step if the checkpoints do not fit on the disk or in memory. A run that continues may
        have filled the disk itself, and trains on: that is said here, and by every save."""
        world, disk, memory = self.run.world, self.disk.store, self.memory
        own = self._expected_bytes()
        how = {"failed": "the checkpoints do not fit", "fix": "--checkpoint.dir LARGER_DISK"}
        num_bytes = bytes_on_host(world, self.disk_hosts, own)

        def look() -> None:
            num_new = max(1, (self.disk.keep or 2) + 1 - len(disk.steps()))  # the steps that stay, and a draft
            try:
                disk.room(num_bytes * num_new)
            except ShoalError as error:
                if not continues:
                    raise
                self.say(f"training continues, but saves may fail: {error.on_command_line()}")

        on_leaders(world, self.disk_hosts, look, **how)
        if memory is not None:
            held = bytes_on_host(world, self.memory_hosts, own)
            on_leaders(world, self.memory_hosts, lambda: _reject_short_memory(memory.store.root, held), **how)

    def claim_store(self) -> None:
        """Lock `checkpoint.dir`; raise if another run saves there now."""
        disk = self.disk.store
        if self.job.recipe.checkpoint.dir is None or not disk.disk.renames:
            return

        def claim() -> None:
            self._lock = locked(disk.root)

        how = {"failed": f"{disk.where} cannot be locked", "fix": "--checkpoint.dir ELSEWHERE"}
        on_leaders(self.run.world, self.disk_hosts, claim, **how)

    def become_writer(self) -> None:
        """Take an object store over, which cannot be locked. An earlier run that still saves there ends by itself."""
        store, world = self.disk.store, self.run.world
        if store.disk.renames:
            return
        how = {"failed": f"{store.where} cannot be written to", "fix": "--checkpoint.dir ELSEWHERE"}
        who = on_main(world, _this_run, **how)
        on_leaders(world, self.disk_hosts, lambda: store.claim(who), **how)

    def release(self) -> None:
        """Unlock `checkpoint.dir`."""
        if self._lock is not None:
            self._lock.close()

    def _expected_bytes(self) -> int:
        """Bytes that this rank will save: its parameters, and two moments of each trained one."""
        composed, total = self.run.composed, 0
        trained, base = {id(parameter) for parameter in self.run.trained_parameters()}, composed.base
        for name, parameter in composed.named.items():
            if composed.is_owner(name) and name not in base:
                size = sum(math.prod(shape) for _, shape in composed.shard_boxes(name)) * parameter.element_size()
                total += size * (1 + 2 * (id(parameter) in trained))
        return total

    # ---- save ------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a save is due by this rank's clock; the main rank's decides for all."""
        if self.every_steps is not None or self.disk.is_busy:
            return False
        passed = time.monotonic() - self._clock
        if self.every_seconds is not None:
            return passed >= self.every_seconds
        if self._cost is None:
            return passed >= FIRST_AUTO
        return passed >= max(LEAST_AUTO, best_interval(self._cost, self.job.recipe.checkpoint.mtbf.seconds or 86400.0))

    def after_step(self, *, is_due: bool) -> None:
        """Save the step if a save is due. `is_due`: it is, by the main rank's clock."""
        done = self.run.steps_done
        if not self._has_buffers:
            self._has_buffers = True
            for saver in (self.disk, self.memory):
                if saver is not None:
                    saver.make_room(holder_of(self.run))
        if self.memory is not None and done % self.memory_steps == 0:
            self._begin(self.memory)
        if is_due or (self.every_steps and done % self.every_steps == 0):
            self._save()
        self._report()

    def begin_last_save(self) -> None:
        """Start to save the last step. A thread writes it while the evaluation runs."""
        self._is_over = True
        if self.last != self.run.steps_done:
            self._save()

    def finish(self) -> None:
        """Wait until the last step is on the disk; then remove the copy in memory."""
        for saver in (self.disk, self.memory):
            if saver is not None:
                saver.finish()
        self._report()
        if self.memory is not None and self.memory_hosts.is_leader and self.saved == self.run.steps_done:
            shutil.rmtree(self.memory.store.root, ignore_errors=True)

    def _save(self) -> None:
        self._cost = self._begin(self.disk)
        self.last = self.run.steps_done
        self._clock = time.monotonic()

    def _begin(self, saver: AsyncSaver) -> float:
        """Returns the seconds that the copy took."""
        prepare_to_save(self.run)
        recipe, data = self.job.recipe.model_dump(mode="json"), self.job.fingerprint.to_mapping()
        prompts = prompt_form(self.job.training)
        state = {**state_of(self.run), "recipe": recipe, "data": data, "prompts": prompts, **self.facts()}
        return saver.begin(holder_of(self.run), step=self.run.steps_done, state=state)

    def _report(self) -> None:
        """Report finished and failed saves."""
        for saver in (self.disk, self.memory):
            if saver is not None:
                saver.raise_error()
        for note in self.disk.store.take_notes():
            self.say(note)
        for saved in self.disk.take_results():
            if saved.failure is not None:
                self.num_failed += 1
                self._note("not saved", saved.step, saved.failure.problems[0].what)
                self.say(
                    f"NOT SAVED{'' if self._is_over else ', training continues'}: {saved.failure.on_command_line()}"
                )
            else:
                self.num_saved += 1
                self.saved = saved.step
                self._note("saved", saved.step)
                if saved.note:
                    self.say(saved.note)
        for saved in self.memory.take_results() if self.memory is not None else ():
            if saved.failure is not None:
                self.say(f"NOT SAVED TO MEMORY, training continues: {saved.failure.on_command_line()}")

    def _note(self, event: Event, step: int, reason: str = "") -> None:
        if self.directory is not None and self.run.is_main:
            append_event(self.directory, event, step, reason)

    def summary(self) -> dict[str, Any]:
        """The part of the run's summary that is about saves."""
        return {
            "saves": self.num_saved,
            "saves_failed": self.num_failed,
            "saved_step": self.saved,
            "save_stall_seconds": self.disk.seconds_held + self.disk.seconds_waited,
            "checkpoint_dir": self.disk.store.where,
        }


def _this_run() -> str:
    """The host, the process and the second, for the user of another run; and a number that no other run has."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {platform.node()[:64]}, since {since} ({secrets.token_hex(8)})"


def nothing_to_resume(store: Store) -> ShoalError:
    """The error of `--resume latest` where there is no checkpoint."""
    return ShoalError(
        f"there is no checkpoint in {store.where} to resume from",
        fix="--resume auto, or --run.dir RUN_DIRECTORY",
        code="C001",
    )


def reject_other_recipe(manifest: Manifest, recipe: Recipe, store: Store) -> None:
    """Raise if the run of a step cannot resume with this recipe."""
    if saved := manifest.state.get("recipe"):  # imported weights have none
        reject_changes(saved, recipe, where=store.where)


def reject_other_data(manifest: Manifest, job: Job, store: Store) -> str:
    """Raise if the run of a step was trained on other data, unless `data.changed` is `accept`; returns the difference
    that was accepted. Manifests without a fingerprint, such as those of imported weights, are not compared."""
    saved = manifest.state.get("data")
    found = job.fingerprint.difference(saved) if isinstance(saved, dict) else ""
    if found and job.recipe.data.changed == "reject":
        raise ShoalError(
            f"the data of {spelled(job.recipe.data.source)} is not what the run in {store.where} was trained on:"
            f" {found}; nothing was touched",
            fix="restore the data; or --resume fresh to start over; or --data.changed accept to resume on the"
            " changed data, of which samples may then be seen twice or not at all in this epoch",
            code="C028",
        )
    return found


def memory_folder_prefix(directory: Path, host: str = "") -> str:
    """The prefix of the memory folder of a run without a launcher on this host. It follows from the run directory and
    the name of the host in --hosts, so that the same command finds the folder again."""
    name = hashlib.sha256(f"{directory.resolve()}{host and f' {host}'}".encode()).hexdigest()[:16]
    return f"shoal-run-{os.geteuid()}-{name}-"


def _memory_root(given: Path | None, memory_dir: str, prefix: str, saves_to: str, say: Say) -> Path:
    """The memory folder of this run: the launcher's, or its own, which is private to this user."""
    root = given or own_folder(memory_dir, prefix, say)
    with memory_folder(str(root.parent)) as parent, PrivateFolder(root.name, parent=parent) as folder:
        folder.write(DISK, place_of(saves_to).encode())
    return root


def _reject_several_hosts(run: Run) -> None:
    if run.world.local_size < run.world.size:
        raise ShoalError(
            f"checkpoint.memory_every must be 0step where ranks are on several hosts, got {run.world.local_size} of"
            f" {run.world.size} ranks on this host",
            fix="`shoal train --hosts`, which copies them to another host; or --checkpoint.memory_every 0step",
            code="C030",
        )


def _reject_short_memory(root: Path, num_bytes: int) -> None:
    """Raise unless two copies fit: the complete one, and the one that is being written."""
    own = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())  # of this run, before a restart
    free = min(shutil.disk_usage(root.parent).free, _available()) + own
    if free < 2 * num_bytes:
        raise ShoalError(
            f"{root.parent} must have {2 * num_bytes / 2**30:.1f} GiB free for the state of this run in memory, got"
            f" {free / 2**30:.1f} GiB",
            fix="--checkpoint.memory_every 0step, or --checkpoint.memory_dir LARGER_MEMORY_FILE_SYSTEM",
            code="C031",
        )


def _available() -> int:
    """Bytes of this host's memory that are not in use."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
