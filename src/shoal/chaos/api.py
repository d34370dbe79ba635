"""`run_chaos`: a drill, an undisturbed run of the same recipe, and the report that compares them."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shoal.chaos.drill import Plan, Screen, run_drill
from shoal.chaos.journal import Journal
from shoal.chaos.kinds import left_out
from shoal.chaos.machine.disk import can_mount
from shoal.chaos.machine.memory_limit import can_limit_memory
from shoal.chaos.machine.network import hosts
from shoal.chaos.machine.processes import Main, become_subreaper, end_all
from shoal.chaos.measure import goodput, outcomes
from shoal.chaos.oracle import compare_runs
from shoal.chaos.report import Report
from shoal.chaos.schedule import Injection, draw_schedule
from shoal.config.load import dump_recipe
from shoal.config.recipe import Recipe
from shoal.errors import RunFailed, ShoalError

WARM_UP = 30
"""Steps of the run that measures the time of a step."""
TRAINED = 0.85
"""The part of the minutes for which the run has steps; the rest is for recovery."""
PATIENCE = 3.0
"""A run that takes this many times its minutes has not ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings of a drill."""

    recipe: Recipe
    faults: int
    seed: int
    minutes: float
    steps: int | None
    """None: as many as fit into the minutes."""
    hosts: int
    ranks_per_host: int
    kinds: tuple[str, ...]
    pace: float
    folder: Path | None = None
    """A new folder, in which everything stays; None: nothing does."""
    main: Main | None = None

    def schedule(self) -> list[Injection]:
        """The faults that can be made here."""
        kinds = [kind for kind in self.kinds if kind not in self.left_out()]
        return draw_schedule(
            self.seed,
            faults=self.faults,
            seconds=60 * self.minutes * TRAINED,
            kinds=kinds,
            ranks=self.hosts * self.ranks_per_host,
        )

    def left_out(self) -> dict[str, str]:
        """Kind → why it cannot be made here."""
        return left_out_here(self.kinds, self.hosts)


def left_out_here(kinds: tuple[str, ...], num_hosts: int) -> dict[str, str]:
    """Kind → why it cannot be made on this machine by this user."""
    is_root = os.geteuid() == 0
    return left_out(kinds, is_root=is_root, num_hosts=num_hosts, missing=_not_allowed() if is_root else {})


@cache
def _not_allowed() -> dict[str, str]:
    """What root cannot do in some containers."""
    tried = {
        "oom": (can_limit_memory(), "no control group of memory can be made"),
        "disk": (can_mount(), "no file system can be mounted"),
    }
    return {kind: why for kind, (is_allowed, why) in tried.items() if not is_allowed}


def run_chaos(request: Request, screen: Screen) -> Report:
    """Run the drill and the undisturbed run. All that they have made is removed, also after Ctrl-C."""
    become_subreaper()
    name = f"shoal-chaos-{os.getpid()}"
    try:
        with _folder(request.folder, name) as folder, hosts(request.hosts, name) as network:
            recipe = folder / "recipe.yaml"
            recipe.write_text(dump_recipe(request.recipe))
            plan = Plan(
                recipe=recipe,
                steps=request.steps or WARM_UP,
                pace=request.pace,
                network=network,
                ranks_per_host=request.ranks_per_host,
                schedule=(),
                name=name,
                most_seconds=PATIENCE * 60 * request.minutes + 120,
                main=request.main,
            )
            if request.steps is None:
                plan = replace(plan, steps=_steps_that_fit(plan, folder / "probe", 60 * request.minutes * TRAINED))
            return _compared(request, plan, folder, screen)
    finally:
        end_all()


def _compared(request: Request, plan: Plan, folder: Path, screen: Screen) -> Report:
    schedule = request.schedule()
    screen.say(f"{plan.steps} steps on {plan.ranks} ranks, {len(schedule)} faults")
    journal, saved = run_drill(replace(plan, schedule=schedule), folder / "disturbed", screen)
    screen.say("the same run without faults")
    plain, plain_saved = run_drill(replace(plan, pace=0.0), folder / "plain", screen)
    _reject_failure(plain, folder / "plain")
    agreement = compare_runs(
        (folder / "disturbed" / "run", folder / "disturbed"),
        (folder / "plain" / "run", folder / "plain"),
        steps=plan.steps,
        tensors_different=_different(saved, plain_saved),
    )
    return Report(
        seed=request.seed,
        schedule=schedule,
        left_out=request.left_out(),
        journal=journal,
        outcomes=outcomes(journal, ranks=plan.ranks),
        goodput=goodput(journal),
        agreement=agreement,
    )


def _steps_that_fit(plan: Plan, folder: Path, seconds: float) -> int:
    journal, _ = run_drill(plan, folder, Screen(lambda text: None))
    _reject_failure(journal, folder)
    gaps = [new.at - old.at for old, new in itertools.pairwise(journal.steps)]
    return max(WARM_UP, int(seconds / statistics.median(gaps)))


def _reject_failure(journal: Journal, folder: Path) -> None:
    if journal.code != 0:
        said = (folder / "err").read_text(errors="replace").strip()
        what = f"the run fails without any fault, with code {journal.code}:\n{said[-3000:]}"
        raise RunFailed(what, fix="shoal train with the same recipe and settings", code="N081")


def _different(first: Path, second: Path) -> int:
    """Tensors that differ between two checkpoints; -1: one is missing."""
    if not (first.exists() and second.exists()):
        return -1
    from shoal.checkpoint.diff import compare  # which needs torch
    from shoal.checkpoint.storage.locate import find

    found = compare(find(first), find(second), weights_only=False, progress=lambda size: None)
    return len(found.differences) + sum(map(len, found.only))


@contextmanager
def _folder(kept: Path | None, name: str) -> Iterator[Path]:
    if kept is not None:
        try:
            kept.mkdir(parents=True)
        except OSError as error:
            what = f"--dir {kept} cannot be made: {error.strerror}"
            raise ShoalError(what, fix="--dir with a new folder", code="N083") from None
        yield kept.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
