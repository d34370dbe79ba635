"""One drill: start the run, make the faults of the schedule, give the command again when it was killed, and wait."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from shoal.blueprint.faults import DRILL
from shoal.chaos.injector import Injector
from shoal.chaos.journal import Journal, Made
from shoal.chaos.machine.disk import Disk, disk
from shoal.chaos.machine.memory_limit import memory_limit
from shoal.chaos.machine.network import Network
from shoal.chaos.machine.processes import Main, Process, start_process
from shoal.chaos.schedule import Injection

TURN = 0.01
"""Seconds between two looks at the run."""
CALM = 0.5
"""Seconds between the recovery from a fault and the next one, unless that is to follow at once."""
SHOWN_EVERY = 0.5
"""Seconds between two updates of the progress line."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a drill reports."""

    say: Callable[[str], None]
    """Print a line."""
    show: Callable[[str], None] = lambda text: None
    """Replace the progress line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run to disturb."""

    recipe: Path
    """Its recipe, a file."""
    steps: int
    pace: float
    """The least seconds of a step."""
    network: Network
    ranks_per_host: int
    schedule: Sequence[Injection] = ()
    name: str
    """A name for control groups, unlike all others on this machine."""
    most_seconds: float
    """After so long, the run is ended: it has not ended by itself."""
    main: Main | None = None

    @property
    def ranks(self) -> int:
        """Ranks of all hosts."""
        return self.ranks_per_host * max(1, len(self.network.names))


@dataclass(slots=True)
class Drill:
    """A run that is under way."""

    plan: Plan
    folder: Path
    screen: Screen
    injector: Injector
    journal: Journal
    disk: Disk
    process: Process | None = None
    pending: list[Injection] = field(default_factory=list)
    unrecovered: list[Made] = field(default_factory=list)
    is_killed: bool = False
    """Whether the command was killed on purpose."""
    shown_at: float = 0.0

    def run(self) -> None:
        """Return when the run has ended, or was ended since it did not."""
        deadline = time.monotonic() + self.plan.most_seconds
        self._start()
        try:
            while time.monotonic() < deadline and not self._has_ended():
                self.journal.read(self.disk.committed())
                self.injector.heal_due()
                self._inject_due()
                self._note_recovered()
                self._show()
                time.sleep(TURN)
        finally:
            self.injector.heal_due(all_now=True)
            if self.process is not None:
                self.process.end()
        self.journal.read(self.disk.committed())
        self._note_recovered()

    def _start(self) -> None:
        words = [
            *["train", str(self.plan.recipe), "--run.dir", str(self.folder / "run"), "--run.log_every", "1"],
            *["--run.duration", f"{self.plan.steps}step", "--checkpoint.dir", str(self.disk.checkpoints), "--json"],
            *self.plan.network.train_options(self.plan.ranks_per_host),
        ]
        self.process = start_process(
            words,
            prefix=self.plan.network.prefix(),
            environ={DRILL: str(self.folder)},
            out=self.folder / "out",
            err=self.folder / "err",
            main=self.plan.main,
        )
        if self.injector.memory is not None:
            self.injector.memory.hold(self.process.pid)
        self.injector.process, self.is_killed = self.process, False
        self.journal.starts += 1

    def _has_ended(self) -> bool:
        """Whether the run is over; a command that was killed on purpose is given again."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return False
        if self.is_killed:
            self._start()
            return False
        self.journal.code = code
        return True

    def _inject_due(self) -> None:
        if not self.pending or not self.journal.steps:
            return
        injection, now = self.pending[0], time.monotonic()
        if now < self.journal.steps[0].at + injection.at:
            return
        if not injection.is_double and not self._is_calm(now) and self.injector.ordered is None:
            return
        made = self.injector.make(injection)
        if made is not None:
            self.pending.pop(0)
            self.journal.made.append(made)
            self.unrecovered.append(made)
            self.is_killed |= injection.kind == "supervisor"

    def _is_calm(self, now: float) -> bool:
        """Whether the run has recovered from all faults so far."""
        if self.unrecovered or self.injector.healing:
            return False
        ends = [self.journal.recovered(each) or 0.0 for each in self.journal.made[-1:]]
        return all(now > end + CALM for end in ends)

    def _show(self) -> None:
        now = time.monotonic()
        if now > self.shown_at + SHOWN_EVERY:
            self.shown_at = now
            step = self.journal.steps[-1].step if self.journal.steps else 0
            done, total = len(self.journal.made), len(self.plan.schedule)
            self.screen.show(f"step {step} of {self.plan.steps}, {done} of {total} faults made")

    def _note_recovered(self) -> None:
        for made in list(self.unrecovered):
            at = self.journal.recovered(made)
            if at is not None:
                self.unrecovered.remove(made)
                if made.injection.kind == "oom":
                    self.injector.heal_due(after=made)
                total = len(self.plan.schedule)
                took = f"{at - made.at:.1f} s to the next step"
                self.screen.say(f"fault {made.injection.number} of {total}: {str(made.injection).strip()}: {took}")


def run_drill(plan: Plan, folder: Path, screen: Screen) -> tuple[Journal, Path]:
    """Run a drill in a new folder; returns what was seen, and the folder of its checkpoints, copied from its disk."""
    kinds = {each.kind for each in plan.schedule}
    for name in ("ranks", "orders", "samples"):
        (folder / name).mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"pace": plan.pace}))
    with ExitStack() as stack:
        place = stack.enter_context(disk(folder / "disk", mount="disk" in kinds))
        memory = stack.enter_context(memory_limit(plan.name)) if "oom" in kinds else None
        injector = Injector(folder, plan.network, place, memory, plan.ranks_per_host)
        journal = Journal(folder / "steps.jsonl", folder / "err")
        drill = Drill(plan, folder, screen, injector, journal, place, pending=list(plan.schedule))
        drill.run()
        journal.write(folder / "journal.json")
        saved = _copied(place, folder / "saved")
    return journal, saved


def _copied(place: Disk, to: Path) -> Path:
    """Copy the newest checkpoint, which would be gone with a file system in memory."""
    newest = place.checkpoints / f"step-{place.committed():08d}"
    if newest.exists():
        shutil.copytree(newest, to)
    return to
