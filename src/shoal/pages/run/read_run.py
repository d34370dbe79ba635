"""Read a run directory: all that a page shows, also of a run that is dead or still running."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.blueprint.layout import Layout
from shoal.blueprint.plan import Plan
from shoal.comm.heartbeat.slowest import Slowest, of_metrics, of_summary
from shoal.errors import ShoalError
from shoal.pages.run.metrics_table import MetricsTable, number, unit_of
from shoal.pages.run.own_files import Record, read_object, read_own, read_records, sample_records, why_not_a_folder
from shoal.pages.run.read_metrics import read_metrics
from shoal.pages.run.state import State, last_write, state_of
from shoal.safe_parsing import MOST_BYTES, parse_yaml

MOST_EVENTS = 2_000
MOST_PROFILE = 2**24
"""Bytes of a profile: it has the parts of every rank."""
MOST_RANKS = 1024
RANK_SAMPLES = 120
"""Steps that are read of each rank's own metrics."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as its directory describes it. Every text in it may be hostile."""

    path: Path
    name: str
    state: State
    last_write: float
    recipe: Record
    recipe_text: str
    environment: Record
    summary: Record
    prediction: Record
    profile: Record
    metrics: MetricsTable
    events: list[Record] = field(default_factory=list)
    saved_steps: list[int] = field(default_factory=list)
    """Steps of the checkpoints that are there now."""
    ranks: dict[int, list[Record]] = field(default_factory=dict)
    """Sampled records of each rank, where each has written its own."""
    damaged: list[str] = field(default_factory=list)
    """Files that are there and cannot be read, and the number of lines that were left out of others."""

    @property
    def step(self) -> int:
        """The last step that is known to be made."""
        found = number(self.summary.get("steps"))
        last = self.metrics.steps[-1] if self.metrics.steps else 0
        return max(last, int(found)) if 0 <= found < 2**53 else last

    @property
    def saved_step(self) -> int:
        """The last step that is known to be saved; 0: there is none. A run that resumes archives later steps than its
        own, and one that starts over all of them."""
        noted: list[int] = []
        for event in self.events:
            if event.get("event") in ("started", "resumed"):
                noted = [step for step in noted if step <= event["step"]]
            elif event.get("event") == "saved":
                noted.append(event["step"])
        return max((*noted, *self.saved_steps), default=0)

    @property
    def slowest(self) -> Slowest | None:
        """The rank that costs the others most, by the summary or else by the last measurement."""
        return of_summary(self.summary.get("straggler")) or of_metrics(self.metrics.straggler)

    @property
    def plan(self) -> Plan | None:
        """The plan that ran; None: it is not known."""
        return _plan(self.summary.get("plan") or self.recipe.get("plan"))

    @property
    def layout(self) -> Layout | None:
        """The ranks on their axes; None: the plan is not known, or leaves them open."""
        try:
            return self.plan.layout if self.plan is not None else None
        except ShoalError:
            return None

    @property
    def unit(self) -> str:
        """The unit of speed."""
        known = self.summary.get("unit")
        if known in ("samples", "tokens"):
            return str(known)
        steps, tokens = self.metrics.steps, self.metrics.column("tokens")
        return unit_of(self.recipe, steps[-1], tokens[-1]) if steps else "tokens"


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return all(_is_file(path / name) for name in ("recipe.yaml", "environment.json"))


def read_run(path: Path, *, with_ranks: bool = True) -> RunRecord:
    """Read the run in a directory."""
    if why := why_not_a_folder(path):
        what = f"RUN must be the directory of a run, got {str(path)!r}, which cannot be entered: {why}"
        raise ShoalError(what, fix="shoal ls, which lists runs", code="R060")
    if not is_run(path):
        what = f"RUN must be the directory of a run, got {str(path)!r}, which has no recipe.yaml and environment.json"
        raise ShoalError(what, fix=f"shoal ls {path}", code="R060")
    summary, environment = read_object(path / "summary.json"), read_object(path / "environment.json")
    text = _recipe_text(path)
    recipe, lost = _recipe(text), Counter[str]()
    metrics = read_metrics(path / "metrics.jsonl", lost)
    return RunRecord(
        path=path,
        name=_name(path, recipe),
        state=state_of(path, summary, environment),
        last_write=last_write(path),
        recipe=recipe,
        recipe_text=text,
        environment=environment,
        summary=summary,
        prediction=read_object(path / "prediction.json"),
        profile=_profile(path, _plan(summary.get("plan") or recipe.get("plan"))),
        metrics=metrics,
        events=list(read_records(path / "events.jsonl", 2**24, lost=lost))[-MOST_EVENTS:],
        saved_steps=_saved_steps(path / "checkpoints"),
        ranks=_ranks(path) if with_ranks else {},
        damaged=_damaged(path, lost, is_recipe=bool(recipe)),
    )


def _plan(text: Any) -> Plan | None:
    """A plan; None: the text is none."""
    try:
        return Plan.parse(text) if isinstance(text, str) and len(text) < 500 else None
    except ShoalError:
        return None


def _profile(path: Path, plan: Plan | None) -> Record:
    """The profile of a run, unless it was made under another plan, before the run was resumed."""
    found = read_object(path / "profile.json", MOST_PROFILE)
    profiled = _plan(found.get("plan"))
    if plan is None or profiled is None or not plan.is_resolved:
        return found
    return found if profiled.brief() == plan.brief() else {}


def _damaged(path: Path, lost: Counter[str], *, is_recipe: bool) -> list[str]:
    """Files that hold something and gave nothing. One torn line is that of a crash, or is being written."""
    objects = ("environment.json", "summary.json", "prediction.json", "profile.json")
    found = [name for name in objects if _holds(path / name) and not read_object(path / name, MOST_PROFILE)]
    lines = [f"{count:,} lines of {name}" for name, count in lost.items() if count > 1]
    links = [f"{name} is a link" for name in (*objects, "metrics.jsonl", "events.jsonl") if (path / name).is_symlink()]
    return [*([] if is_recipe else ["recipe.yaml"]), *found, *lines, *links]


def _holds(path: Path) -> bool:
    return _is_file(path) and bool(read_own(path, 1))


def read_recipe(path: Path) -> Record:
    """The recipe of the run in a directory; empty if it cannot be read."""
    return _recipe(_recipe_text(path))


def _recipe_text(path: Path) -> str:
    return read_own(path / "recipe.yaml", MOST_BYTES).decode(errors="replace")


def _recipe(text: str) -> Record:
    try:
        found = parse_yaml(text, "recipe.yaml", fix="")
    except ShoalError:
        return {}
    return found if isinstance(found, dict) else {}


def _name(path: Path, recipe: Record) -> str:
    run = recipe.get("run")
    named = run.get("name") if isinstance(run, dict) else None
    return path.resolve().name or str(named or "run")


def _saved_steps(path: Path) -> list[int]:
    """The steps of a folder of checkpoints that is no link."""
    if not _is_file(path, stat.S_ISDIR):
        return []
    names = [entry.name for entry in _entries(path)][:10_000]
    return [int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,15}", name)]


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; nothing, if it cannot be read."""
    try:
        return sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:
        return []


def _ranks(path: Path) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for entry in _entries(path):
        match = re.fullmatch(r"metrics\.rank(\d{1,6})\.jsonl", entry.name)
        if match and len(found) < MOST_RANKS:
            found[int(match[1])] = sample_records(Path(entry.path), RANK_SAMPLES)
    return dict(sorted(found.items()))


def _is_file(path: Path, is_kind: Any = stat.S_ISREG) -> bool:
    try:
        return bool(is_kind(os.stat(path, follow_symlinks=False).st_mode))
    except OSError:
        return False
