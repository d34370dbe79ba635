"""What was seen of a run, with the time of each event on the monotonic clock."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from shoal.chaos.kinds import KINDS
from shoal.chaos.schedule import Injection


class Step(NamedTuple):
    """A step that rank 0 has made."""

    at: float
    step: int
    worker: str
    """The process of rank 0 and its generation: a process that survives the loss of another rank begins a new one."""


class Line(NamedTuple):
    """A line that the command has printed, and when it was seen."""

    at: float
    text: str


class Commit(NamedTuple):
    """A step that was seen to be the newest checkpoint."""

    at: float
    step: int


@dataclass(slots=True)
class Made:
    """A fault that was made."""

    injection: Injection
    at: float
    until: float = 0.0
    """When it was healed; 0: it heals by itself."""
    damaged: int | None = None
    """The checkpoint that was damaged."""
    host: str = ""
    """The host whose loss is reported; empty: none has to be."""


@dataclass(slots=True)
class _Tail:
    """The lines that are appended to a file."""

    path: Path
    offset: int = 0

    def read(self) -> list[str]:
        """The complete lines since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.offset += end
        return data[:end].decode(errors="replace").splitlines()


@dataclass(slots=True)
class Journal:
    """Steps, lines, commits and faults of one run, in the order of time."""

    steps_file: Path
    error_file: Path
    steps: list[Step] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    starts: int = 0
    """How often the command was given."""
    code: int | None = None
    """The exit code of the last one; None: it did not end in time."""
    _tails: tuple[_Tail, _Tail] | None = None

    def read(self, committed: int) -> None:
        """Read what is new."""
        if self._tails is None:
            self._tails = (_Tail(self.steps_file), _Tail(self.error_file))
        steps, lines = self._tails
        now = time.monotonic()
        self.lines += [Line(now, text) for text in lines.read()]
        for text in steps.read():
            found = json.loads(text)
            self.steps.append(Step(found["at"], found["step"], f"{found['pid']} {found['generation']}"))
        if committed >= 0 and (not self.commits or self.commits[-1].step != committed):
            self.commits.append(Commit(now, committed))

    def write(self, path: Path) -> None:
        """Write what cannot be read from the run's own files."""
        made = [{**asdict(each), "kind": each.injection.kind} for each in self.made]
        path.write_text(json.dumps({"made": made, "commits": self.commits, "starts": self.starts, "code": self.code}))

    def top(self, before: float) -> int:
        """The highest step that was made before a moment."""
        return max((each.step for each in self.steps if each.at <= before), default=0)

    def recovered(self, made: Made) -> float | None:
        """When the run was further than at the fault; None: not yet.

        After a fault that ends processes, new ones have to make a step that the old ones had not made. After another
        one, the step that was under way does not count.
        """
        return self._resumed(made) if KINDS[made.injection.kind].ends_ranks else self._continued(made)

    def _resumed(self, made: Made) -> float | None:
        before = [each for each in self.steps if each.at <= made.at]
        old = before[-1].worker if before else ""
        top = max((each.step for each in self.steps if each.worker == old), default=0)
        return next((e.at for e in self.steps if e.at > made.at and e.worker != old and e.step > top), None)

    def _continued(self, made: Made) -> float | None:
        top, after = self.top(made.at), max(made.at, made.until)
        since = next((each.at for each in self.steps if each.at > made.at and each.step > top + 1), None)
        if since is None or made.injection.kind != "disk":
            return since
        best = max((each.step for each in self.commits if each.at <= made.at), default=-1)
        return next((each.at for each in self.commits if each.at > after and each.step > best), None)
