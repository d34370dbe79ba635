"""The run directory: what was asked, where it ran, and what came of it.

runs/tiny/
  recipe.yaml         every setting, resolved; `shoal train recipe.yaml` does it again
  environment.json    versions, machine, command, time
  metrics.jsonl       one JSON object per logged step
  checkpoints/        steps that it can go on from
  lock                held by the process that writes here, for as long as it lives
  summary.json        written last: a directory without it is a run that did not end well
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shoal.config.load import dump_recipe
from shoal.config.recipe import Recipe
from shoal.config.resume_compat import changes, reject_changes
from shoal.errors import ShoalError
from shoal.files import opened, read_regular
from shoal.observe.durable_write import FULL, make_directory, room, sync, write_whole
from shoal.observe.metrics import jsonable
from shoal.safe_parsing import parse_yaml, read_text
from shoal.version import __version__

# environment.json goes last: while it is there, an interrupted removal can be told from a folder of the user's own.
_WRITTEN = (
    *("recipe.yaml", "metrics*.jsonl", "summary.json", "events.out.tfevents.*", "wandb", "checkpoints"),
    "environment.json",
)


MOST_SUMMARY = 2**24
"""Bytes of a summary that is read."""
PATIENCE = 6.0
"""Seconds to wait for a lock: processes that a killed one had started hold it until they notice, after five."""


class RunDirectory:
    """A directory that belongs to one run, and to one process that writes to it. Only the main rank makes one."""

    def __init__(
        self, path: Path, *, goes_on: bool = False, is_fresh: bool = False, lock: BinaryIO | None = None
    ) -> None:
        self.path, self.goes_on = path, goes_on
        """Whether it holds a run of this recipe that is to go on."""
        self.evaluation: tuple[int, float] | None = None
        """The step and the loss of the last evaluation that the run goes on after; None: there is none."""
        self._is_fresh, self._lock = is_fresh, lock

    @classmethod
    def claim(cls, recipe: Recipe, resume: str = "auto") -> RunDirectory:
        """The directory of this recipe, made or found, or say why it cannot be had.

        resume    auto: go on with a run of this recipe that has not ended; what else is there is never written over
                  fresh: begin anew; `begin` removes an earlier run in a directory that was named
                  else: go on with what is there, whether or not it has ended
        """
        path = Path(recipe.run.dir) if recipe.run.dir else _numbered(recipe, resume=resume)
        try:
            goes_on = _goes_on(path, recipe, resume)
            make_directory(path, private=True)
            return cls(path, goes_on=goes_on, is_fresh=resume == "fresh", lock=locked(path))
        except OSError as error:
            raise _unwritable(path, error) from None

    @classmethod
    def foreseen(cls, recipe: Recipe, resume: str = "auto") -> RunDirectory:
        """What `claim` would give, or say why it would not; nothing is made."""
        path = Path(recipe.run.dir) if recipe.run.dir else _numbered(recipe, resume=resume)
        try:
            goes_on = _goes_on(path, recipe, resume)
            _try_to_write(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path, goes_on=goes_on, is_fresh=resume == "fresh")

    def begin(self, recipe: Recipe) -> None:
        """Say what is done here, now that nothing speaks against it; what is to go, goes now."""
        try:
            if self._is_fresh:
                _remove_run(self.path)
            write_whole(self.path / "recipe.yaml", dump_recipe(recipe))
            write_whole(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
            (self.path / "summary.json").unlink(missing_ok=True)  # it has not ended any more
            sync(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def give_up(self) -> None:
        """Leave it as it was found; if it was made for nothing, remove it."""
        if self._lock is not None and {path.name for path in self.path.iterdir()} <= {"lock", "checkpoints"}:
            with suppress(OSError):
                (self.path / "lock").unlink()
                if (self.path / "checkpoints").is_dir():
                    (self.path / "checkpoints").rmdir()  # which it does only if nothing is in it
                self.path.rmdir()
        self.close()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Say how the run ended."""
        try:
            write_whole(self.path / "summary.json", json.dumps(jsonable(summary), indent=2) + "\n")
            sync(self.path)
        except OSError as error:
            raise _unwritable(self.path, error, "summary.json") from None

    def forget_after(self, step: int, *, and_its_evaluation: bool = False) -> None:
        """Leave out what was told of later steps, which are made once more; also the evaluation of this one, if asked
        to."""
        for path in self.path.glob("metrics*.jsonl"):
            lines = _lines(path)  # a power loss may have left anything in the last ones
            kept = [line for line in lines if _step_of(line) <= step]
            if and_its_evaluation:
                kept = [line for line in kept if _step_of(line) < step or '"eval_loss"' not in line]
            try:
                if kept != lines:
                    write_whole(path, "".join(f"{line}\n" for line in kept))
            except OSError as error:
                raise _unwritable(self.path, error, path.name) from None

    def last_evaluation(self) -> tuple[int, float] | None:
        """The step and the loss of the last evaluation that was told of; None: none was."""
        path = self.path / "metrics.jsonl"
        lines = _lines(path) if path.exists() else []
        whole = (line for line in reversed(lines) if math.isfinite(_step_of(line)))
        told = next((line for line in whole if '"eval_loss"' in line), None)
        if told is None:
            return None
        record = json.loads(told)
        return record["step"], float(record["eval_loss"])  # what is not finite is written as a word

    def close(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            self._lock.close()


def _lines(path: Path) -> list[str]:
    with opened(path, "r", encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in file]


def _step_of(line: str) -> float:
    """Of a line of metrics; infinity, if a crash has torn it."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers of a run."""
    cuda = torch.cuda.is_initialized()
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shoal": __version__,
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
    }


def _numbered(recipe: Recipe, *, resume: str) -> Path:
    """The last of `runs/NAME`, `runs/NAME-2`, ..., if it is to go on; else the first one that is free."""
    last, path = None, Path("runs") / recipe.run.name
    number = 1
    while path.exists():
        last, number = path, number + 1
        path = path.with_name(f"{recipe.run.name}-{number}")
    if last is None or resume == "fresh" or _is_locked(last):
        return path
    if resume != "auto":
        return last
    stored = _stored(last)
    return last if stored is not None and not _has_ended(last) and not changes(stored, recipe) else path


def _goes_on(path: Path, recipe: Recipe, resume: str) -> bool:
    """Whether there is a run to go on with; raises, if there is something else."""
    if path.exists() and not path.is_dir():
        raise ShoalError(f"the run directory {str(path)!r} is a file", fix="--run.dir SOMEWHERE_ELSE")
    if not path.exists() or not any(path.iterdir()):
        if resume not in ("auto", "fresh") and recipe.checkpoint.dir is None:
            raise ShoalError(
                f"there is no run in {str(path)!r} to go on with, and no checkpoint",
                fix="--run.dir of a run, or --resume auto",
            )
        return False
    stored = _stored(path)
    if stored is None:
        raise ShoalError(
            f"{str(path)!r} is not empty and holds no run of shoal; nothing was touched", fix="--run.dir SOMEWHERE_ELSE"
        )
    _refuse_locked(path)
    if resume == "fresh":
        return False
    reject_changes(stored, recipe, where=repr(str(path)))
    if resume == "auto" and _has_ended(path):
        raise ShoalError(
            f"{str(path)!r} already holds a run of this recipe, which has ended; nothing was touched",
            fix="--resume latest and a longer --run.duration to go on; --resume fresh to remove it and begin anew; or"
            " --run.dir SOMEWHERE_ELSE",
        )
    return True


def _try_to_write(path: Path) -> None:
    """Raise what the system would, as far as it tells beforehand, of a directory that is there or is to be made."""
    found = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not found.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _unwritable(path: Path, error: OSError, name: str = "") -> ShoalError:
    what = f"the run directory {str(path)!r}" if not name else repr(str(path / name))
    return ShoalError(
        f"{what} cannot be written: {error.strerror}{room(path, error)}",
        fix="make room, or --run.dir SOMEWHERE_ELSE"
        if error.errno in FULL
        else "--run.dir SOMEWHERE that you may write to",
    )


def _stored(path: Path) -> dict[str, Any] | None:
    """The recipe that a run directory was made for."""
    try:
        text = read_text(path / "recipe.yaml", fix="")
        found = parse_yaml(text, "recipe.yaml", fix="")
    except (OSError, ShoalError):
        return None
    return found if isinstance(found, dict) else None


def _has_ended(path: Path) -> bool:
    """Whether the run reached its end; one that was stopped, or died, did not."""
    try:
        summary = json.loads(read_regular(path / "summary.json", MOST_SUMMARY))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(summary, dict):
        return False
    # One whose last step could not be saved has something left to do.
    is_saved = summary.get("saved_step", summary.get("steps")) == summary.get("steps")
    return is_saved and not summary.get("was_stopped", False)


def locked(path: Path) -> BinaryIO:
    """A lock on a directory that goes with this process, however it ends."""
    file: BinaryIO = opened(path / "lock", "ab")
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise _taken(path) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return file
        else:
            return file


def _is_locked(path: Path) -> bool:
    if not (path / "lock").exists():
        return False
    try:
        locked(path).close()
    except ShoalError:
        return True
    except OSError:
        return False
    return False


def _refuse_locked(path: Path) -> None:
    if _is_locked(path):
        raise _taken(path)


def _taken(path: Path) -> ShoalError:
    return ShoalError(
        f"another process is training in {str(path)!r}; nothing was touched",
        fix="wait for it, or --run.dir SOMEWHERE_ELSE",
    )


def _remove_run(path: Path) -> None:
    """Remove what a run of shoal writes, and nothing else: the directory may hold other things as well."""
    if all((path / name).exists() for name in ("recipe.yaml", "environment.json")):
        for pattern in _WRITTEN:
            for entry in path.glob(pattern):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
