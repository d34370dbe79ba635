"""The run directory: the recipe, the environment, the metrics and the result of a run.

runs/tiny/
  recipe.yaml         every setting, resolved; `shoal train recipe.yaml` repeats the run
  environment.json    versions, machine, command, time
  metrics.jsonl       one JSON object per logged step
  events.jsonl        starts, saves and failures, one JSON object each
  checkpoints/        saved steps
  lock                locked by the process that writes here, until it ends
  profile.json        of a run with run.profile, like trace.json: the parts of a step under its plan
  summary.json        written last: a directory without it is an unfinished run
  prediction.json     written after it: what the planner predicts of the plan that ran
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shoal.affinity import num_cores
from shoal.config.load import dump_recipe
from shoal.config.recipe import Recipe
from shoal.config.resume_compat import changes, reject_changes
from shoal.errors import ShoalError
from shoal.files import opened, read_regular
from shoal.observe.durable_write import FULL, make_directory, room, suppress_full, sync, write_whole
from shoal.observe.events import append_event
from shoal.observe.jsonable import jsonable
from shoal.observe.run_lock import has_begun_in, is_locked, locked, reject_locked, sign
from shoal.observe.run_names import claimed_by, numbered_runs
from shoal.safe_parsing import parse_yaml, read_text
from shoal.version import __version__

# The recipe is removed after the checkpoints: without it, an interrupted removal looks like a user's own folder.
_WRITTEN = (
    *("metrics*.jsonl", "summary.json", "events.out.tfevents.*", "wandb", "checkpoints"),
    *("events.jsonl", "prediction.json", "report.html", "profile.json", "trace.json"),
    *("environment.json", "recipe.yaml"),
)

_OF_BEFORE = ("summary.json", "prediction.json", "profile.json", "trace.json")
"""What a run that resumes leaves out of date: its plan, its machine and its settings of a profile may be others."""

MOST_SUMMARY = 2**24
"""The largest size of a summary in bytes."""


class RunDirectory:
    """The directory of one run, locked by the one process that writes to it. Only the main rank makes one."""

    def __init__(
        self,
        path: Path,
        *,
        resumes: bool = False,
        is_fresh: bool = False,
        lock: BinaryIO | None = None,
        command: str = "",
    ) -> None:
        self.path, self.resumes = path, resumes
        """Whether it holds a run of this recipe that resumes."""
        self.evaluation: tuple[int, float] | None = None
        """The step and the loss of the last evaluation before the resume; None: there is none."""
        self.beside = ""
        """Why the run before this one is left alone; empty: there is none, or it resumes."""
        self._is_fresh, self._lock, self._command = is_fresh, lock, command

    @classmethod
    def claim(
        cls, recipe: Recipe, resume: str = "auto", *, command: str = "", is_restart: bool = False
    ) -> RunDirectory:
        """Create or find the directory of this recipe, and lock it.

        resume      auto: resume an unfinished run of this recipe; never overwrite anything else
                    fresh: start over; `begin` removes an earlier run in a named directory
                    else: resume the run in the directory, finished or not
        command     identifies the command that started the run, the same after a restart
        is_restart  find the directory that an earlier generation of this command has claimed
        """
        path = Path(recipe.run.dir) if recipe.run.dir else None
        path = path or (claimed_by(recipe, command) if is_restart else None)
        path = path or _numbered(recipe, resume=resume, is_restart=is_restart)
        try:
            resumes = _can_resume(path, recipe, resume)
            make_directory(path, private=True)
            lock = locked(path)
            with suppress(OSError):  # a full disk: the lock works without it
                sign(lock, command, has_begun=is_restart and has_begun_in(path, command))
            found = cls(path, resumes=resumes, is_fresh=resume == "fresh", lock=lock, command=command)
            found.beside = _beside(path, recipe) if resume == "auto" and not resumes else ""
            return found
        except OSError as error:
            raise _unwritable(path, error) from None

    @classmethod
    def claim_again(cls, recipe: Recipe, command: str) -> RunDirectory:
        """Lock the directory in which this command has trained this recipe before. Nothing in it is compared."""
        path = Path(recipe.run.dir) if recipe.run.dir else claimed_by(recipe, command)
        path = path or _numbered(recipe, resume="auto", is_restart=True)
        try:
            return cls(path, resumes=True, lock=locked(path))
        except OSError as error:
            raise _unwritable(path, error) from None

    @staticmethod
    def has_begun(recipe: Recipe, command: str) -> bool:
        """Whether an earlier generation of this command has begun to train. Until then, a restart has to do again what
        the command says: to start over, or to resume from a step that is not the newest."""
        path = Path(recipe.run.dir) if recipe.run.dir else claimed_by(recipe, command)
        path = path or _numbered(recipe, resume="auto", is_restart=True)
        if "/" in command and recipe.checkpoint.dir is not None and not os.path.exists(path / "lock"):
            return True  # perhaps on another machine, and the steps that it has saved must stay
        return has_begun_in(path, command)

    @classmethod
    def preview(cls, recipe: Recipe, resume: str = "auto") -> RunDirectory:
        """The result of `claim`, or its error, without creating anything."""
        path = Path(recipe.run.dir) if recipe.run.dir else _numbered(recipe, resume=resume)
        try:
            resumes = _can_resume(path, recipe, resume)
            _try_to_write(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path, resumes=resumes, is_fresh=resume == "fresh")

    def begin(self, recipe: Recipe, *, continues: bool = False) -> None:
        """Write the recipe and the environment, and remove what the run before has measured last; if `fresh`, all of
        it. All checks have passed by now. `continues`: this command has begun before; on a full disk, its
        files stay."""
        try:
            if self._is_fresh:
                _remove_run(self.path)
            with suppress_full() if continues else nullcontext():
                write_whole(self.path / "recipe.yaml", dump_recipe(recipe))
                write_whole(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
            for name in _OF_BEFORE:  # the run is unfinished again
                (self.path / name).unlink(missing_ok=True)
            sync(self.path)
            if self._lock is not None:
                sign(self._lock, self._command, has_begun=True)  # last: a kill before this repeats all of it
                os.fsync(self._lock.fileno())  # before the first save: a restart must not remove that
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def give_up(self) -> None:
        """Release the directory; remove it if `claim` has created it."""
        if self._lock is not None and {path.name for path in self.path.iterdir()} <= {"lock", "checkpoints"}:
            with suppress(OSError):
                (self.path / "lock").unlink()
                if (self.path / "checkpoints").is_dir():
                    (self.path / "checkpoints").rmdir()  # fails unless it is empty
                self.path.rmdir()
        self.close()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of the finished run."""
        try:
            write_whole(self.path / "summary.json", json.dumps(jsonable(summary), indent=2) + "\n")
            sync(self.path)
        except OSError as error:
            raise _unwritable(self.path, error, "summary.json") from None
        append_event(self.path, "stopped" if summary.get("was_stopped") else "ended", summary.get("steps", 0))

    def drop_metrics_after(self, step: int, *, and_its_evaluation: bool = False) -> None:
        """Remove the metrics of later steps, which will be repeated, and optionally the evaluation of this step."""
        for path in self.path.glob("metrics*.jsonl"):
            lines = _lines(path)  # a power loss may have damaged the last ones
            valid = [line for line in lines if _step_of(line) <= step]
            if and_its_evaluation:
                valid = [line for line in valid if _step_of(line) < step or '"eval_loss"' not in line]
            try:
                if valid != lines:
                    write_whole(path, "".join(f"{line}\n" for line in valid))
            except OSError as error:
                if error.errno not in FULL or not _truncated(path, valid):
                    raise _unwritable(self.path, error, path.name) from None

    def last_evaluation(self) -> tuple[int, float] | None:
        """The step and the loss of the last recorded evaluation; None: there is none."""
        path = self.path / "metrics.jsonl"
        lines = _lines(path) if path.exists() else []
        whole = (line for line in reversed(lines) if math.isfinite(_step_of(line)))
        last = next((line for line in whole if '"eval_loss"' in line), None)
        if last is None:
            return None
        record = json.loads(last)
        return record["step"], float(record["eval_loss"])  # a loss that is not finite is a string

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()


def _lines(path: Path) -> list[str]:
    with opened(path, "r", encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in file]


def _truncated(path: Path, lines: list[str]) -> bool:
    """Whether a file has been reduced to its first lines, which needs no space; False: it begins with others."""
    data = "".join(f"{line}\n" for line in lines).encode()
    with opened(path, "r+b") as file:
        if file.read(len(data)) != data:
            return False
        file.truncate(len(data))
        os.fsync(file.fileno())
    return True


def _step_of(line: str) -> float:
    """The step of a line of metrics; infinity if a crash has damaged it."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf


def environment() -> dict[str, Any]:
    """The facts that explain the numbers of a run: command, machine, versions."""
    cuda = torch.cuda.is_initialized()
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": num_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shoal": __version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
    }


def _numbered(recipe: Recipe, *, resume: str, is_restart: bool = False) -> Path:
    """The newest of `runs/NAME`, `runs/NAME-2`, ... that resumes; else the first free one."""
    there = list(numbered_runs(recipe))
    last = there[-1] if there else None
    path = Path("runs") / (f"{recipe.run.name}-{len(there) + 1}" if there else recipe.run.name)
    if last is None or resume == "fresh":
        return path
    if is_locked(last) and is_restart:
        return last  # a restart waits for its own lock, and never starts over beside it
    if resume != "auto":
        return path if is_locked(last) else last
    return next((each for each in reversed(there) if not _why_not_resumed(each, recipe) and not is_locked(each)), path)


def _beside(path: Path, recipe: Recipe) -> str:
    """Why the numbered run before a new one is not resumed."""
    before = [each for each in numbered_runs(recipe) if each != path]
    if recipe.run.dir or not before:
        return ""
    return _why_not_resumed(before[-1], recipe)


def _why_not_resumed(path: Path, recipe: Recipe) -> str:
    """Why a new run does not resume the run in a directory; empty: it does."""
    stored = _stored(path)
    if stored is None:
        return f"{str(path)!r} holds no run"
    if found := changes(stored, recipe):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"{str(path)!r} has other settings: {'; '.join(found[:3])}{more}"
    if _has_ended(path):
        return f"{str(path)!r} has ended; --resume latest with a longer --run.duration continues it"
    return ""


def _can_resume(path: Path, recipe: Recipe, resume: str) -> bool:
    """Whether a directory has a run to resume; raises if it holds anything else."""
    if path.exists() and not path.is_dir():
        raise ShoalError(
            f"run.dir must be a directory, got the file {str(path)!r}", fix="--run.dir SOMEWHERE_ELSE", code="C022"
        )
    if not path.exists() or _is_unused(path):
        if resume not in ("auto", "fresh") and recipe.checkpoint.dir is None:
            raise ShoalError(
                f"there is no run to resume in {str(path)!r}, and no checkpoint",
                fix="--run.dir DIRECTORY_OF_A_RUN, or --resume auto",
                code="C023",
            )
        return False
    stored = _stored(path)
    if stored is None:
        raise ShoalError(
            f"{str(path)!r} is not empty and holds no run of shoal; nothing was touched",
            fix="--run.dir SOMEWHERE_ELSE",
            code="C024",
        )
    reject_locked(path)
    if resume == "fresh":
        return False
    reject_changes(stored, recipe, where=repr(str(path)))
    if resume == "auto" and _has_ended(path):
        raise ShoalError(
            f"{str(path)!r} already holds a finished run of this recipe; nothing was touched",
            fix="--resume latest with a longer --run.duration, or --resume fresh to remove it and start over, or"
            " --run.dir SOMEWHERE_ELSE",
            code="C025",
        )
    return True


def _is_unused(path: Path) -> bool:
    """Whether a directory is empty, but for files of a command that was killed between `claim` and `begin`."""
    names = {entry.name for entry in path.iterdir()}
    if "lock" not in names:
        return not names
    saves = path / "checkpoints"
    saved = [entry.name for entry in saves.iterdir()] if saves.is_dir() else []
    is_own = names <= {"lock", "checkpoints", "events.jsonl", "recipe.part"}
    return is_own and all(name == "lock" or name.startswith(".draft-") for name in saved)


def _try_to_write(path: Path) -> None:
    """Raise the error that writing to an existing or new directory would raise, as far as it can be foreseen."""
    found = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _unwritable(path: Path, error: OSError, name: str = "") -> ShoalError:
    what = f"the run directory {str(path)!r}" if not name else repr(str(path / name))
    return ShoalError(
        f"{what} cannot be written: {error.strerror}{room(path, error)}",
        fix="make room, or --run.dir SOMEWHERE_ELSE" if error.errno in FULL else "--run.dir WRITABLE_DIRECTORY",
        code="C026",
    )


def _stored(path: Path) -> dict[str, Any] | None:
    """The stored recipe of a run directory; None: there is none."""
    try:
        text = read_text(path / "recipe.yaml", fix="")
        found = parse_yaml(text, "recipe.yaml", fix="")
    except (OSError, ShoalError):
        return None
    return found if isinstance(found, dict) else None


def _has_ended(path: Path) -> bool:
    """Whether the run is finished, not stopped and not failed."""
    try:
        summary = json.loads(read_regular(path / "summary.json", MOST_SUMMARY))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(summary, dict):
        return False
    # A run whose last step could not be saved is not finished.
    is_saved = summary.get("saved_step", summary.get("steps")) == summary.get("steps")
    return is_saved and not summary.get("was_stopped", False)


def _remove_run(path: Path) -> None:
    """Remove the files that a run of shoal writes, and no others."""
    if all((path / name).exists() for name in ("recipe.yaml", "environment.json")):
        for pattern in _WRITTEN:
            for entry in path.glob(pattern):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
