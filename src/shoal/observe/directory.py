"""The run directory: what was asked, where it ran, and what came of it.

runs/tiny/
  recipe.yaml         every setting, resolved; `shoal train recipe.yaml` does it again
  environment.json    versions, machine, command, time
  metrics.jsonl       one JSON object per logged step
  summary.json        written last: a directory without it is a run that did not end well
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from shoal.blueprint.recipe import Recipe
from shoal.blueprint.settings import difference, dump_recipe
from shoal.errors import ShoalError
from shoal.observe.metrics import jsonable
from shoal.version import __version__

# Settings that decide where and how a run is shown, not what it computes: they may differ between two of the same.
_INCIDENTAL = ("run.dir", "run.overwrite")

# environment.json goes last: while it is there, an interrupted removal can be told from a folder of the user's own.
_WRITTEN = ("recipe.yaml", "metrics*.jsonl", "summary.json", "events.out.tfevents.*", "wandb", "environment.json")


class RunDirectory:
    """A directory that belongs to one run. Only the main rank makes one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def claim(cls, recipe: Recipe) -> RunDirectory:
        """Make the directory of this recipe, or say why it cannot be had; what is in it is never written over."""
        path = Path(recipe.run.dir) if recipe.run.dir else _first_free(Path("runs") / recipe.run.name)
        try:
            if recipe.run.overwrite:
                _remove_run(path)
            _refuse_taken(path, recipe)
            path.mkdir(parents=True, exist_ok=True)
            (path / "recipe.yaml").write_text(dump_recipe(recipe))
            (path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
        except OSError as error:
            raise ShoalError(
                f"the run directory {str(path)!r} cannot be written: {error.strerror}",
                fix="--run.dir SOMEWHERE that you may write to",
            ) from None
        return cls(path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Say how the run ended."""
        (self.path / "summary.json").write_text(json.dumps(jsonable(summary), indent=2) + "\n")


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


def _first_free(path: Path) -> Path:
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _remove_run(path: Path) -> None:
    """Remove what a run of shoal writes, and nothing else: the directory may hold other things as well."""
    if all((path / name).exists() for name in ("recipe.yaml", "environment.json")):
        for pattern in _WRITTEN:
            for entry in path.glob(pattern):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _refuse_taken(path: Path, recipe: Recipe) -> None:
    if path.exists() and not path.is_dir():
        raise ShoalError(f"the run directory {str(path)!r} is a file", fix="--run.dir SOMEWHERE_ELSE")
    if not path.exists() or not any(path.iterdir()):
        return
    stored = path / "recipe.yaml"
    if not stored.exists():
        raise ShoalError(
            f"{str(path)!r} is not empty and holds no run of shoal; nothing was touched", fix="--run.dir SOMEWHERE_ELSE"
        )
    lines = difference(yaml.safe_load(stored.read_text()) or {}, recipe.model_dump(mode="json"))
    changed = [line for line in lines if not line.startswith(_INCIDENTAL)]
    what = "the run of another recipe: " + "; ".join(changed[:5]) if changed else "a run of this recipe"
    raise ShoalError(
        f"{str(path)!r} already holds {what}; nothing was touched",
        fix="--run.dir SOMEWHERE_ELSE, or --run.overwrite true to remove the earlier run",
    )
